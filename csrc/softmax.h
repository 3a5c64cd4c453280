// Softmax of blocks of scores in base 2, keys × queries, and the merge of blocks.
#pragma once

#include <cstdint>
#include <limits>

#include "isa.h"
#include "memory.h"
#include "product.h"
#include "simd.h"

namespace smyrf::SMYRF_ISA {

// Replaces scores by the weights 2^(S − top), for V vectors of queries; writes the largest score and the sum of
// weights.
template <class T, int V>
inline void softmax_of(T* scores, int64_t size, T* top, T* sum) {
    constexpr int W = Simd<T>::W;
    const Vec<T> nothing = fill(-std::numeric_limits<T>::infinity());
    Vec<T> shift[V], total[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) shift[v] = nothing;
    for (int64_t j = 0; j < size; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) shift[v] = larger<T>(load(scores + j * QUERY_BLOCK + v * W), shift[v]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        store(top + v * W, shift[v]);
        shift[v] = shift[v] == nothing ? Vec<T>{} : shift[v];  // no key: 2^(-inf − 0) = 0
        total[v] = Vec<T>{};
    }
    for (int64_t j = 0; j < size; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            T* at = scores + j * QUERY_BLOCK + v * W;
            const Vec<T> weight = power(load(at) - shift[v]);
            store(at, weight);
            total[v] += weight;
        }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sum + v * W, total[v]);
}

template <class T>
void softmax(T* scores, int64_t size, int64_t columns, T* top, T* sum) {
    constexpr int W = Simd<T>::W;
    int64_t i = 0;
    for (; i + 4 * W <= columns; i += 4 * W) softmax_of<T, 4>(scores + i, size, top + i, sum + i);
    for (; i < columns; i += W) softmax_of<T, 1>(scores + i, size, top + i, sum + i);
}

// Merge weights of the earlier result of each query and of its result in a block, by their softmax mass (eq. 15).
//
// `state` holds base and mass of each query: Σ 2^S = mass · 2^base. `keep` is the weight of the earlier result, zero if
// there is none; `share` that of the block. Queries from `n_hopeful` on have seen all of their keys: if no score was
// above -inf, the result is NaN, as that of any softmax.
template <class T>
void merge_shares(const int32_t* queries, int64_t n, int64_t n_hopeful, const T* top, const T* sum, T* state, T* keep,
                  T* share) {
    constexpr int W = Simd<T>::W;
    const T infinity = std::numeric_limits<T>::infinity();
    alignas(64) T base[QUERY_BLOCK], mass[QUERY_BLOCK], nothing[QUERY_BLOCK];
    for (int64_t i = 0; i < round_up(n, W); ++i) {
        const bool there = i < n && queries[i] >= 0;
        base[i] = there ? state[2 * static_cast<int64_t>(queries[i])] : -infinity;
        mass[i] = there ? state[2 * static_cast<int64_t>(queries[i]) + 1] : T(0);
        nothing[i] = i >= n_hopeful ? std::numeric_limits<T>::quiet_NaN() : T(0);
    }
    for (int64_t i = 0; i < n; i += W) {
        const Vec<T> was = load(base + i), now = larger<T>(was, load(top + i));
        const Vec<T> shift = now == fill(-infinity) ? Vec<T>{} : now;
        const Vec<T> a = load(mass + i) * power(was - shift), b = power(load(top + i) - shift);
        Vec<T> total = a + load(sum + i) * b;
        total = total == Vec<T>{} ? load(nothing + i) : total;
        const Vec<T> part = T(1) / (total == Vec<T>{} ? fill(T(1)) : total);
        store(base + i, now), store(mass + i, total), store(keep + i, a * part), store(share + i, b * part);
    }
    for (int64_t i = 0; i < n; ++i) {
        if (queries[i] < 0) continue;
        T* to = state + 2 * static_cast<int64_t>(queries[i]);
        to[0] = base[i], to[1] = mass[i];
    }
}

}  // namespace smyrf::SMYRF_ISA
