// Vectors of one instruction set, by GCC's and Clang's vector extensions.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "isa.h"

namespace smyrf::SMYRF_ISA {

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

template <class T>
struct Bits;
template <>
struct Bits<float> {
    using Int = int32_t;
    using Unsigned = uint32_t;
};
template <>
struct Bits<double> {
    using Int = int64_t;
    using Unsigned = uint64_t;
};

template <class T>
struct Simd {
    static constexpr int W = SMYRF_BYTES / sizeof(T);  // lanes
    typedef T V __attribute__((vector_size(SMYRF_BYTES)));
    typedef T U __attribute__((vector_size(SMYRF_BYTES), aligned(sizeof(T)), may_alias));  // at any address
    typedef typename Bits<T>::Int IntVec __attribute__((vector_size(SMYRF_BYTES)));
    typedef typename Bits<T>::Unsigned UnsignedVec __attribute__((vector_size(SMYRF_BYTES)));  // sums may wrap
};

template <class T>
using Vec = typename Simd<T>::V;

template <class T>
inline Vec<T> load(const T* p) {
    return *reinterpret_cast<const typename Simd<T>::U*>(p);
}

template <class T>
inline void store(T* p, Vec<T> x) {
    *reinterpret_cast<typename Simd<T>::U*>(p) = x;
}

template <class T>
inline Vec<T> fill(T x) {
    return x - Vec<T>{};
}

template <class T>
inline Vec<T> larger(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;
}

template <class T>
inline Vec<T> lesser(Vec<T> a, Vec<T> b) {
    return a > b ? b : a;  // a NaN in a stays
}

// 2ˣ for x <= 0, to one or two ulps; 0 below the smallest normal number, NaN for NaN. Adding `magic` rounds to an
// integer n and leaves n + bias in the last bits, which are the exponent of 2ⁿ once they are shifted into its place;
// the polynomial is 2ʳ for |r| <= ½.
inline Vec<float> power(Vec<float> x) {
    using UnsignedVec = Simd<float>::UnsignedVec;
    const Vec<float> magic = fill(12582912.0f + 127.0f);  // 1.5 · 2²³ + bias
    x = larger<float>(fill(-127.0f), x);                  // the exponent of zero; NaN is not larger, and stays
    const Vec<float> t = x + magic;
    const Vec<float> r = x - (t - magic);
    Vec<float> p = r * 0.00015353361993071223f + 0.001339887445228043f;  // minimax, error 2⁻²⁹
    p = p * r + 0.009618437357649562f;
    p = p * r + 0.055503324710423345f;
    p = p * r + 0.24022647913627435f;
    p = p * r + 0.6931472028550945f;
    p = p * r + 1.0f;
    return p * (Vec<float>)((UnsignedVec)t << 23);
}

inline Vec<double> power(Vec<double> x) {
    using UnsignedVec = Simd<double>::UnsignedVec;
    const Vec<double> magic = fill(6755399441055744.0 + 1023.0);  // 1.5 · 2⁵² + bias
    x = larger<double>(fill(-1023.0), x);
    const Vec<double> t = x + magic;
    const Vec<double> r = (x - (t - magic)) * 0.6931471805599453;
    constexpr double factorial[14] = {1,    1,     2,      6,       24,       120,       720,
                                      5040, 40320, 362880, 3628800, 39916800, 479001600, 6227020800.0};
    Vec<double> p = fill(1.0 / factorial[13]);
#pragma GCC unroll 16
    for (int i = 12; i >= 0; --i) p = p * r + 1.0 / factorial[i];
    return p * (Vec<double>)((UnsignedVec)t << 52);
}

// log x for x >= 0, to one or two ulps: x = m · 2ᵉ with m near 1, and log m = 2 artanh(s), s = (m − 1) / (m + 1).
template <class T>
inline Vec<T> logarithm(Vec<T> x) {
    using Int = typename Simd<T>::IntVec;
    constexpr bool WIDE = sizeof(T) == 8;
    constexpr int MANTISSA = WIDE ? 52 : 23, TERMS = WIDE ? 10 : 4;
    const typename Bits<T>::Int root =
        WIDE ? static_cast<typename Bits<T>::Int>(0x3FE6A09E667F3BCD) : 0x3F3504F3;  // √½
    const Int exponent = ((Int)x - root) >> MANTISSA;
    const Vec<T> m = (Vec<T>)((Int)x - (exponent << MANTISSA));
    const Vec<T> s = (m - T(1)) / (m + T(1)), z = s * s;
    Vec<T> sum = fill(T(1) / (2 * TERMS + 1));
    for (int i = TERMS - 1; i >= 0; --i) sum = sum * z + T(1) / (2 * i + 1);
    Vec<T> e;
    for (int i = 0; i < Simd<T>::W; ++i) e[i] = static_cast<T>(exponent[i]);
    const Vec<T> found = T(2) * s * sum + e * T(LN_2);
    const Vec<T> none = fill(-std::numeric_limits<T>::infinity());
    return x == Vec<T>{} ? none : x == x ? found : x;
}

#ifdef __clang__
#define SMYRF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SMYRF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, typename Simd<T>::IntVec{__VA_ARGS__})
#endif

// Swaps bit S of the row index with bit S of the lane index, for all W rows.
template <class T, int S, int... LANE>
inline void swap_bits(Vec<T>* rows, std::integer_sequence<int, LANE...>) {
    constexpr int W = Simd<T>::W;
    for (int i = 0; i < W; ++i) {
        if (i & S) continue;
        const Vec<T> a = rows[i], b = rows[i | S];
        rows[i] = SMYRF_SHUFFLE(a, b, ((LANE & S) ? W + (LANE ^ S) : LANE)...);
        rows[i | S] = SMYRF_SHUFFLE(a, b, ((LANE & S) ? W + LANE : (LANE | S))...);
    }
}

// Transposes W rows of W numbers.
template <class T>
inline void transpose(Vec<T>* rows) {
    constexpr int W = Simd<T>::W;
    constexpr std::make_integer_sequence<int, W> lanes{};
    if constexpr (W >= 16) swap_bits<T, 8>(rows, lanes);
    if constexpr (W >= 8) swap_bits<T, 4>(rows, lanes);
    if constexpr (W >= 4) swap_bits<T, 2>(rows, lanes);
    swap_bits<T, 1>(rows, lanes);
}

// The lanes in which a comparison is true, as bits.
template <class T>
inline uint32_t lanes(typename Simd<T>::IntVec found) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_movepi32_mask((__m512i)found);
    else
        return _mm512_movepi64_mask((__m512i)found);
#elif defined(__AVX__)
    if constexpr (sizeof(T) == 4)
        return static_cast<uint32_t>(_mm256_movemask_ps((__m256)found));
    else
        return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)found));
#else
    uint32_t bits = 0;
    for (int i = 0; i < Simd<T>::W; ++i) bits |= (found[i] != 0 ? 1u : 0u) << i;
    return bits;
#endif
}

}  // namespace smyrf::SMYRF_ISA
