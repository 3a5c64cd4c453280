// `attend`, backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "group_pairs.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

// Where the gradients of one row are summed; those of far keys belong to one list.
template <class T>
struct RowSums {
    T *dq, *dk, *dv;                        // (N, D), (M, D), (M, E)
    T *d_far_keys, *d_far_values, *d_bias;  // (T, D), (T, E), (T)
};

// Gradients of one group. P = 2^(S − LSE) with the log-sum-exp over all lists is the final weight of a pair, so the
// gradients of lists add up. Rounding of huge scores can put S above LSE: a weight is 1 at most.
//
// `grad` is the row's (N, E); `delta` (N) the product of output and gradient of each query.
template <class T>
void backward_group(const AttendRow<T>& row, int64_t list_number, int64_t group, const T* all_lse, const T* grad,
                    int64_t grad_stride, const T* delta, const RowSums<T>& sums, Scratch<T>& scratch) {
    constexpr int W = Simd<T>::W;
    const AttendParams& params = row.params;
    const GroupList& list = params.lists[list_number];
    const int64_t width = params.width, value_width = params.value_width;
    GroupKeys<T>& keys = GroupKeys<T>::mine();
    row.collect(list, group, true, keys);
    if (keys.size == 0) return;
    const int64_t key_columns = round_up(width, W), value_columns = round_up(value_width, W);
    const int64_t most = block_size(keys.size, KEY_BLOCK);
    T* packed = scratch.queries.get(width * QUERY_BLOCK);
    T* packed_grad = scratch.grads.get(value_width * QUERY_BLOCK);
    T* weights = scratch.scores.get(KEY_BLOCK * QUERY_BLOCK);
    T* dscores = scratch.dscores.get(KEY_BLOCK * QUERY_BLOCK);
    const T** key_rows = scratch.pointers[0].get(KEY_BLOCK);
    const T infinity = std::numeric_limits<T>::infinity();
    alignas(64) T lse[QUERY_BLOCK], deltas[QUERY_BLOCK], ones[KEY_BLOCK], scales[KEY_BLOCK];
    for (int64_t j = 0; j < KEY_BLOCK; ++j) ones[j] = T(1), scales[j] = row.scale;
    const T *q_rows[QUERY_BLOCK], *g_rows[QUERY_BLOCK];
    T *dq_rows[QUERY_BLOCK], *dk_rows[KEY_BLOCK], *dv_rows[KEY_BLOCK];
    const T* row_lse = all_lse + row.number * params.n_queries;

    for (int64_t first = 0; first < list.n_query_slots; first += QUERY_BLOCK) {
        const int64_t n = std::min<int64_t>(QUERY_BLOCK, list.n_query_slots - first), columns = round_up(n, W);
        const int32_t* queries = row.queries(list, group) + first;
        for (int64_t i = 0; i < QUERY_BLOCK; ++i) {
            const int64_t query = i < n ? queries[i] : -1;
            // A query without keys and an empty slot have no weights: 2^(S − inf) is zero.
            lse[i] = query < 0 || row_lse[query] == -infinity ? infinity : row_lse[query] * T(LOG2_E);
            deltas[i] = query < 0 ? T(0) : delta[query];
            q_rows[i] = query < 0 ? nullptr : row.q + query * params.q.row_stride;
            g_rows[i] = query < 0 ? nullptr : grad + query * grad_stride;
            dq_rows[i] = query < 0 ? nullptr : sums.dq + query * width;
        }
        pack_columns(q_rows, n, width, row.scale * T(LOG2_E), packed);
        pack_columns(g_rows, n, value_width, T(1), packed_grad);
        const Scattered<T> q_whole =
            whole_vectors(q_rows, n, width, scratch.pointers[1].get(QUERY_BLOCK), scratch.query_rows);
        const Scattered<T> g_whole =
            whole_vectors(g_rows, n, value_width, scratch.pointers[2].get(QUERY_BLOCK), scratch.grad_rows);
        const Pairs<T> pairs(row, list_number, group, first, n, keys);
        const int64_t n_seen = pairs.n_seen();
        for (int64_t start = 0; start < n_seen; start += most) {
            const int64_t size = std::min(most, n_seen - start);
            product<T>(Scattered<T>{keys.k.data() + start}, size, 1, Strided<T>{packed, QUERY_BLOCK}, columns, width,
                       Store<T>{weights, QUERY_BLOCK}, scratch.prefetch);
            product<T>(Scattered<T>{keys.v.data() + start}, size, 1, Strided<T>{packed_grad, QUERY_BLOCK}, columns,
                       value_width, Store<T>{dscores, QUERY_BLOCK}, scratch.prefetch);  // dO Vᵀ
            for (int64_t j = 0; j < size; ++j) {
                T *w = weights + j * QUERY_BLOCK, *d = dscores + j * QUERY_BLOCK;
                if (start + j >= pairs.first_adjusted()) pairs.adjust(start + j, w, columns);
                for (int64_t i = 0; i < columns; i += W)
                    store(w + i, power(lesser<T>(load(w + i) - load(lse + i), Vec<T>{})));
                if (row.dropout.active) {
                    for (int64_t i = 0; i < n; ++i) {
                        const T factor = pairs.dropout_factor(start + j, i), weight = w[i];
                        w[i] = weight * factor;
                        d[i] = weight * (d[i] * factor - deltas[i]);
                    }
                } else {  // dS = P ∘ (dO Vᵀ − δ)
                    for (int64_t i = 0; i < columns; i += W)
                        store(d + i, load(w + i) * (load(d + i) - load(deltas + i)));
                }
                if (start + j < keys.n_listed) {
                    const int64_t key = keys.number[start + j];
                    dk_rows[j] = sums.dk + key * width, dv_rows[j] = sums.dv + key * value_width;
                } else {
                    const int64_t far = keys.slot[start + j];
                    dk_rows[j] = sums.d_far_keys + far * width, dv_rows[j] = sums.d_far_values + far * value_width;
                    T total = 0;
                    for (int64_t i = 0; i < n; ++i) total += d[i];
                    sums.d_bias[far] += total;
                }
            }
            // A key may be in a group twice: tiles are merged row by row, so that no sum is lost.
            product<T>(Strided<T>{weights, QUERY_BLOCK}, size, 1, g_whole, value_columns, n,
                       Merge<T>{dv_rows, ones, ones, value_width}, scratch.prefetch);  // Σ_i P dO
            product<T>(Strided<T>{dscores, QUERY_BLOCK}, size, 1, q_whole, key_columns, n,
                       Merge<T>{dk_rows, ones, scales, width}, scratch.prefetch);  // Σ_i dS q
            const Scattered<T> k_whole = whole_vectors(keys.k.data() + start, size, width, key_rows, scratch.key_rows);
            product<T>(Strided<T>{dscores, 1}, n, QUERY_BLOCK, k_whole, key_columns, size,
                       Merge<T>{dq_rows, ones, scales, width}, scratch.prefetch);  // Σ_j dS k
        }
    }
}

// Whether groups of two parts share a far key, so that each part needs its own sums.
inline bool parts_share_far_keys(const GroupList& list, int64_t n_parts) {
    const int64_t n = list.far.n_per_group;
    if (n == 0) return false;
    std::unique_ptr<int64_t[]> part_of(new int64_t[list.far.n_rows]());  // 1 + the part that has the far key, 0: none
    for (int64_t part = 0; part < n_parts; ++part)
        for (int64_t i = list.n_groups * part / n_parts * n; i < list.n_groups * (part + 1) / n_parts * n; ++i) {
            int64_t& owner = part_of[list.far.index[i]];
            if (owner != 0 && owner != part + 1) return true;
            owner = part + 1;
        }
    return false;
}

template <class T>
void attend_backward(const AttendParams& params, const AttendGradients& gradients) {
    if (params.batch * params.heads == 0) return;
    const int threads = params.execution.threads;
    const int64_t n_queries = params.n_queries, width = params.width, value_width = params.value_width;
    const int64_t n_kv = params.batch * params.kv_heads, repeat = params.heads / params.kv_heads;
    const int64_t n_lists = params.lists.n;
    const T *out = typed<T>(gradients.out), *lse = typed<T>(gradients.lse);
    const int64_t dq_size = repeat * n_queries * width;
    const int64_t dk_size = params.n_keys * width, dv_size = params.n_keys * value_width;

    // Heads that share keys add to the same rows of dk and dv, groups of a row to those and to the rows of shared far
    // keys. So the rows of a key head are one task, which adds them up in a fixed order. Few key heads are cut into
    // parts of their groups, each with its own sums, which are added at the end. The number of parts depends only on
    // shapes: results do not depend on the number of threads.
    int64_t most_groups = 1;
    for (const GroupList& list : params.lists) most_groups = std::max(most_groups, list.n_groups);
    const int64_t n_parts = std::min(most_groups, n_kv >= 4 ? 1 : 4 / n_kv);
    // Where the own sums of the far keys of a list begin, among those of a row; equal to the next if there are none.
    std::unique_ptr<int64_t[]> far_start(new int64_t[n_lists + 1]());
    for (int64_t h = 0; h < n_lists; ++h) {
        const GroupList& list = params.lists[h];
        const bool own = n_parts > 1 && parts_share_far_keys(list, n_parts);
        far_start[h + 1] = far_start[h] + (own ? list.far.n_rows * (width + value_width + 1) : 0);
    }
    const int64_t far_size = far_start[n_lists];
    // A query is in one group of a list: with a single list no two parts add to the same row of dq.
    const int64_t own_dq_size = n_lists == 1 ? 0 : dq_size;
    const int64_t own_size = own_dq_size + dk_size + dv_size + repeat * far_size;
    std::unique_ptr<T[]> own_sums(new T[(n_parts - 1) * n_kv * own_size]());
    std::unique_ptr<T[]> delta(new T[params.batch * params.heads * n_queries]);
    run(params.batch * params.heads, threads, [&](int64_t row) {
        const T* grad = head_of<T>(gradients.grad, row / params.heads, row % params.heads);
        for (int64_t i = row * n_queries; i < (row + 1) * n_queries; ++i, grad += gradients.grad.row_stride)
            delta[i] = dot(grad, out + i * value_width, value_width);
    });

    // The sums of head r of a key head, in one part, for one list.
    const auto sums_of = [&](int64_t kv, int64_t part, int64_t r, int64_t h) {
        const FarKeys& far = params.lists[h].far;
        RowSums<T> sums;
        T* own = part == 0 ? nullptr : own_sums.get() + ((part - 1) * n_kv + kv) * own_size;
        const bool has_own_dq = part > 0 && own_dq_size > 0;
        sums.dq = (has_own_dq ? own : typed<T>(gradients.dq) + kv * dq_size) + r * n_queries * width;
        sums.dk = part > 0 ? own + own_dq_size : typed<T>(gradients.dk) + kv * dk_size;
        sums.dv = part > 0 ? sums.dk + dk_size : typed<T>(gradients.dv) + kv * dv_size;
        if (part > 0 && far_start[h] < far_start[h + 1]) {
            sums.d_far_keys = own + own_dq_size + dk_size + dv_size + r * far_size + far_start[h];
            sums.d_far_values = sums.d_far_keys + far.n_rows * width;
            sums.d_bias = sums.d_far_values + far.n_rows * value_width;
        } else {
            const int64_t first_far = (kv * repeat + r) * far.n_rows;
            sums.d_far_keys = typed<T>(far.d_keys) + first_far * width;
            sums.d_far_values = typed<T>(far.d_values) + first_far * value_width;
            sums.d_bias = typed<T>(far.d_bias) + first_far;
        }
        return sums;
    };
    run(n_kv * n_parts, threads, [&](int64_t task) {
        const int64_t kv = task / n_parts, part = task % n_parts;
        Scratch<T>& scratch = Scratch<T>::mine();
        for (int64_t r = 0; r < repeat; ++r) {
            const AttendRow<T> row(params, kv * repeat + r);
            const T* grad = head_of<T>(gradients.grad, row.number / params.heads, row.number % params.heads);
            for (int64_t h = 0; h < n_lists; ++h) {
                const RowSums<T> sums = sums_of(kv, part, r, h);
                const int64_t n_groups = params.lists[h].n_groups, last = n_groups * (part + 1) / n_parts;
                for (int64_t g = n_groups * part / n_parts; g < last; ++g) {
                    scratch.prefetch.clear();
                    if (g + 1 < last) row.prefetch(params.lists[h], g + 1, scratch.prefetch, nullptr);
                    backward_group(row, h, g, lse, grad, gradients.grad.row_stride,
                                   delta.get() + row.number * n_queries, sums, scratch);
                    scratch.prefetch.finish();
                }
            }
        }
    });
    const auto add = [](T* to, const T* from, int64_t n) {
        for (int64_t i = 0; i < n; ++i) to[i] += from[i];
    };
    if (n_parts == 1) return;
    run(n_kv, threads, [&](int64_t kv) {
        for (int64_t part = 1; part < n_parts; ++part)
            for (int64_t r = 0; r < repeat; ++r)
                for (int64_t h = 0; h < n_lists; ++h) {
                    const RowSums<T> to = sums_of(kv, 0, r, h), from = sums_of(kv, part, r, h);
                    const int64_t n_far = far_start[h] < far_start[h + 1] ? params.lists[h].far.n_rows : 0;
                    add(to.d_far_keys, from.d_far_keys, n_far * width);
                    add(to.d_far_values, from.d_far_values, n_far * value_width);
                    add(to.d_bias, from.d_bias, n_far);
                    if (h > 0) continue;  // the others are sums over all lists
                    if (own_dq_size > 0) add(to.dq, from.dq, n_queries * width);
                    if (r > 0) continue;  // … and over the heads that share keys
                    add(to.dk, from.dk, dk_size);
                    add(to.dv, from.dv, dv_size);
                }
    });
}

}  // namespace smyrf::SMYRF_ISA
