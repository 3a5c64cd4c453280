// Hashes of queries and keys, and their orders (eqs. 4 and 14 of the paper).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

// Inner products of up to QUERY_BLOCK vectors with all directions, and squared norms: products[h][i], norms[i].
template <class T>
void project(const T* x, int64_t stride, int64_t n, int64_t width, const T* directions, int64_t direction_stride,
             int64_t n_directions, T* products, int64_t length, T* norms) {
    constexpr int W = Simd<T>::W;
    const int64_t columns = round_up(n, W);
    const T* rows[QUERY_BLOCK];
    for (int64_t i = 0; i < n; ++i) rows[i] = x + i * stride;
    Scratch<T>& scratch = Scratch<T>::mine();
    scratch.prefetch.clear();
    T* packed = scratch.queries.get(width * QUERY_BLOCK);
    T* found = scratch.scores.get(std::max<int64_t>(KEY_BLOCK, n_directions) * QUERY_BLOCK);
    pack_columns(rows, n, width, T(1), packed);
    product<T>(Strided<T>{directions, direction_stride}, n_directions, 1, Strided<T>{packed, QUERY_BLOCK}, columns,
               width, Store<T>{found, QUERY_BLOCK}, scratch.prefetch);
    for (int64_t h = 0; h < n_directions; ++h)
        std::memcpy(products + h * length, found + h * QUERY_BLOCK, n * sizeof(T));
    for (int64_t i = 0; i < columns; i += W) {
        Vec<T> sum{};
        for (int64_t d = 0; d < width; ++d)
            sum += load(packed + d * QUERY_BLOCK + i) * load(packed + d * QUERY_BLOCK + i);
        store(found + i, sum);
    }
    std::memcpy(norms, found, n * sizeof(T));
}

// The smallest and the largest finite number that is not masked; inf and -inf if there is none.
template <class T>
std::pair<T, T> finite_range(const T* numbers, const bool* mask, int64_t n) {
    constexpr int W = Simd<T>::W;
    const T infinity = std::numeric_limits<T>::infinity();
    Vec<T> low = fill(infinity), high = fill(-infinity);
    alignas(64) T part[W];
    for (int64_t i = 0; i < n; i += W) {
        Vec<T> x;
        if (mask == nullptr && i + W <= n) {
            x = load(numbers + i);
        } else {
            for (int64_t j = 0; j < W; ++j)
                part[j] = i + j < n && (mask == nullptr || mask[i + j]) ? numbers[i + j] : infinity;
            x = load(part);
        }
        const typename Simd<T>::IntVec counts = (x < infinity) & (x > -infinity);
        low = (counts & (x < low)) ? x : low;
        high = (counts & (x > high)) ? x : high;
    }
    std::pair<T, T> found{infinity, -infinity};
    for (int j = 0; j < W; ++j) found = {std::min(found.first, low[j]), std::max(found.second, high[j])};
    return found;
}

// u·a for u = [scale · x; √(radius² − ‖scale · x‖²)], from x·a and ‖x‖².
template <class T>
void hash(const T* products, const T* norms, int64_t n, T scale, T radius_sq, T of_rest, float* hashes) {
    for (int64_t i = 0; i < n; ++i) {
        const T rest = radius_sq - norms[i] * scale * scale;  // rounding can make it negative
        hashes[i] = static_cast<float>(products[i] * scale + of_rest * std::sqrt(rest < T(0) ? T(0) : rest));
    }
}

// Stable argsort by a radix sort of pairs (number, place), last digit first. Returns false, without a result, if more
// than `most` numbers share a first digit other than the largest.
template <int BITS, int PASSES>
bool argsort(const uint32_t* numbers, int64_t n, int64_t most, int32_t* order) {
    constexpr int VALUES = 1 << BITS;
    const auto digit = [](uint32_t number, int pass) { return number >> (BITS * pass) & (VALUES - 1); };
    uint32_t starts[PASSES][VALUES] = {};
    for (int64_t i = 0; i < n; ++i)
        for (int pass = 0; pass < PASSES; ++pass) ++starts[pass][digit(numbers[i], pass)];
    uint32_t largest = 0;
    for (int value = 0; value < VALUES - 1; ++value) largest = std::max(largest, starts[PASSES - 1][value]);
    if (largest > most) return false;
    for (int pass = 0; pass < PASSES; ++pass) {
        uint32_t total = 0;
        for (uint32_t& start : starts[pass]) {
            const uint32_t count = start;
            start = total;
            total += count;
        }
    }
    static thread_local Buffer<uint64_t> pairs[2];
    uint64_t *from = pairs[0].get(n), *to = pairs[1].get(n);
    for (int64_t i = 0; i < n; ++i)
        to[starts[0][digit(numbers[i], 0)]++] = static_cast<uint64_t>(numbers[i]) << 32 | static_cast<uint64_t>(i);
    for (int pass = 1; pass < PASSES - 1; ++pass) {
        std::swap(from, to);
        for (int64_t i = 0; i < n; ++i) to[starts[pass][digit(static_cast<uint32_t>(from[i] >> 32), pass)]++] = from[i];
    }
    for (int64_t i = 0; i < n; ++i)
        order[starts[PASSES - 1][digit(static_cast<uint32_t>(to[i] >> 32), PASSES - 1)]++] =
            static_cast<int32_t>(static_cast<uint32_t>(to[i]));
    return true;
}

// Argsort of hashes; those that are not finite come after all others, masked ones last.
//
// Sorted are the buckets ⌊(u·a + b) / r⌋ of eq. 13, with −b the smallest hash, and r the span of all hashes divided by
// far more than their number: by 2²², about float precision, or by 2¹⁸ for a few thousand. These are two digits of 11
// or 9 bits instead of three. If a few outliers leave too few buckets for the others, the hashes themselves are sorted.
template <int BITS>
void order_by_hash(const float* hashes, const bool* mask, int64_t n, int32_t* order) {
    constexpr uint32_t MASKED = (1u << 2 * BITS) - 1, INFINITE = MASKED - 1, LARGEST = MASKED - 2;
    constexpr float NO_NUMBER = std::numeric_limits<float>::infinity();
    static thread_local Buffer<uint32_t> memory;
    uint32_t* numbers = memory.get(n);
    const auto [low, high] = finite_range(hashes, mask, n);
    // If the span overflows or vanishes there is no factor: all are in one bucket, and the hashes are sorted below.
    const float span = high - low, ratio = LARGEST / span,
                factor = span < NO_NUMBER && ratio < NO_NUMBER ? ratio : 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        const bool finite = std::abs(hashes[i]) < NO_NUMBER;
        const float place = finite && factor > 0.0f ? std::max((hashes[i] - low) * factor, 0.0f) : 0.0f;
        const auto number = static_cast<uint32_t>(static_cast<int32_t>(std::min(place, static_cast<float>(LARGEST))));
        numbers[i] = finite ? number : INFINITE;
    }
    if (mask != nullptr)
        for (int64_t i = 0; i < n; ++i) numbers[i] = mask[i] ? numbers[i] : MASKED;
    if (n >= 512 && argsort<BITS, 2>(numbers, n, n / 16, order)) return;
    for (int64_t i = 0; i < n; ++i) {  // a float's bits, as an unsigned integer of the same order
        uint32_t bits;
        std::memcpy(&bits, hashes + i, sizeof bits);
        bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        numbers[i] = numbers[i] >= INFINITE ? 0xFFFFFF00u + (numbers[i] - INFINITE) : bits;
    }
    argsort<8, 4>(numbers, n, n, order);
}

template <class T>
void sort_by_hash(const HashParams& params) {
    if (params.batch * params.heads == 0) return;
    const int threads = params.execution.threads;
    const T scale = static_cast<T>(params.scale), *vectors = typed<T>(params.vectors);
    const int64_t repeat = params.heads / params.kv_heads, n_kv = params.batch * params.kv_heads, H = params.n_hashes;
    const int64_t N = params.n_queries, M = params.n_keys, D = params.width;
    const int64_t q_blocks = (N + QUERY_BLOCK - 1) / QUERY_BLOCK, k_blocks = (M + QUERY_BLOCK - 1) / QUERY_BLOCK;
    // As many key heads at a time as keep all threads busy, so that intermediate results stay small.
    const int64_t at_once = std::min(n_kv, (threads + repeat - 1) / repeat);
    static thread_local Buffer<T> memory;
    T* of_queries = memory.get(at_once * (H + 1) * (repeat * N + M));  // products (H, N) and norms (N) of each row
    T* of_keys = of_queries + at_once * repeat * (H + 1) * N;
    for (int64_t first = 0; first < n_kv; first += at_once) {
        const int64_t n = std::min(at_once, n_kv - first);
        run(n * (repeat * q_blocks + k_blocks), threads, [&](int64_t task) {
            const bool is_query = task < n * repeat * q_blocks;
            if (!is_query) task -= n * repeat * q_blocks;
            const int64_t blocks = is_query ? q_blocks : k_blocks, length = is_query ? N : M;
            const int64_t place = task / blocks, start = task % blocks * QUERY_BLOCK;
            const int64_t heads = is_query ? params.heads : params.kv_heads;
            const int64_t row = place + first * (is_query ? repeat : 1);
            const Rows& all = is_query ? params.q : params.k;
            const T* x = head_of<T>(all, row / heads, row % heads) + start * all.row_stride;
            T* to = (is_query ? of_queries : of_keys) + place * (H + 1) * length;
            project(x, all.row_stride, std::min<int64_t>(QUERY_BLOCK, length - start), D, vectors, D + 2, H, to + start,
                    length, to + H * length + start);
        });
        run(n * repeat * H, threads, [&](int64_t task) {
            const int64_t place = task / H, h = task % H, row = place + first * repeat;
            const T* q = of_queries + place * (H + 1) * N;
            const T* k = of_keys + place / repeat * (H + 1) * M;
            const bool* mask = params.key_mask == nullptr ? nullptr : params.key_mask + row / params.heads * M;
            // Eq. 4: F(q) = [q; 0; √(M_Q² + M_K² − ‖q‖²)], G(k) = [k; √(M_Q² + M_K² − ‖k‖²); 0].
            // Vectors with inf or NaN do not count: they must not move all the others.
            const T radius_sq = std::max(T(0), finite_range<T>(q + H * N, nullptr, N).second) * scale * scale +
                                std::max(T(0), finite_range<T>(k + H * M, mask, M).second);
            const T* a = vectors + h * (D + 2) + D;
            static thread_local Buffer<float> memory_of_hashes;
            float* hashes = memory_of_hashes.get(std::max(N, M));
            const auto sort = [&](const bool* visible, int64_t length, int32_t* order) {
                length < 4096 ? order_by_hash<9>(hashes, visible, length, order)
                              : order_by_hash<11>(hashes, visible, length, order);
            };
            hash<T>(q + h * N, q + H * N, N, scale, radius_sq, a[1], hashes);
            sort(nullptr, N, params.q_order + (row * H + h) * N);
            hash<T>(k + h * M, k + H * M, M, T(1), radius_sq, a[0], hashes);
            sort(mask, M, params.k_order + (row * H + h) * M);
        });
    }
    memory.trim();
}

}  // namespace smyrf::SMYRF_ISA
