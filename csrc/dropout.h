// Dropout by a counter, identical to smyrf/backends/dropout.py.
#pragma once

#include <cstdint>

#include "isa.h"
#include "params.h"

namespace smyrf::SMYRF_ISA {

inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// The random numbers of one row of one list.
inline uint32_t dropout_stream(int64_t seed, int64_t number) {
    const uint32_t first = mix(static_cast<uint32_t>(number) ^ static_cast<uint32_t>(seed));
    return mix(first ^ static_cast<uint32_t>(seed >> 32));
}

// A weight is dropped if its random number is below `threshold`; the others are multiplied by `scale`.
template <class T>
struct Dropout {
    bool active;
    uint32_t threshold;
    T scale;

    explicit Dropout(double p)
        : active(p > 0.0),
          threshold(p < 1.0 ? static_cast<uint32_t>(p * 4294967296.0) : 0),
          scale(p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : T(0)) {}  // float in every backend
};

}  // namespace smyrf::SMYRF_ISA
