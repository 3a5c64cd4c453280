// Gradients of the keys and values that a level of Tangent attention has folded.
//
// Weights P = softmax(q̄·k) are computed again from λ, the log-sum-exp of each far key. With the gradients g of the far
// key k̃ = Σ P k and its value ṽ = Σ P v, and that of its bias λ − q̄·k̃, the slopes of a candidate are
//     dk = P g + P (g·k + g_v·v − δ) q̄,  dv = P g_v,  where g has absorbed −q̄ · d_bias and δ = g·k̃ + g_v·ṽ − d_bias.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "candidates.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

// Up to QUERY_BLOCK clusters below one parent (columns) and some candidates of the parent (rows).
template <class T>
class FoldGradient {
   public:
    FoldGradient(const LevelGradients& params, int64_t parent, int64_t first, int64_t n)
        : params_(params),
          keys_(params.keys),
          candidates_(params.keys, parent),
          n_(n),
          columns_(round_up(n, W)),
          row_(candidates_.row()),
          first_cluster_(parent * keys_.fan_out % (keys_.n_parents * keys_.fan_out / (keys_.batch * keys_.heads)) +
                         first),
          scratch_(Scratch<T>::mine()) {
        const T* centroids = typed<T>(keys_.centroids) + (parent * keys_.fan_out + first) * keys_.width;
        for (int64_t i = 0; i < n; ++i) {
            centroids_[i] = centroids + i * keys_.width;
            kept_[i] = part<int32_t>(params.kept, row_, (first_cluster_ + i) * params.n_near);
        }
        for (int64_t i = 0; i < KEY_BLOCK; ++i) ones_[i] = T(1);
        scratch_.prefetch.clear();
        packed_ = scratch_.queries.get(keys_.width * QUERY_BLOCK);
        pack_columns(centroids_, n, keys_.width, T(LOG2_E), packed_);
        weights_ = scratch_.scores.get(KEY_BLOCK * QUERY_BLOCK);
        dscores_ = scratch_.dscores.get(KEY_BLOCK * QUERY_BLOCK);
    }

    // Adds the gradients of candidates begin … end − 1 to dk (M, D) and dv (M, E).
    void run(int64_t begin, int64_t end, T* dk, T* dv) {
        int64_t next[QUERY_BLOCK] = {};  // the first kept candidate that was not met yet
        for (int64_t f = 0; f < params_.n_far; ++f) {
            const int64_t first = std::max(begin, f * keys_.n_candidates / params_.n_far);
            const int64_t last = std::min(end, (f + 1) * keys_.n_candidates / params_.n_far);
            if (first >= last) continue;
            read_far_keys(f);
            const int64_t most = block_size(last - first, KEY_BLOCK);
            for (int64_t start = first; start < last; start += most) {
                const int64_t size = std::min(most, last - start);
                candidates_.look_up(start, size);
                candidates_.prefetch(start + size, most, true, scratch_.prefetch);
                weigh(start, size, next);
                add(size, dk, dv);
            }
        }
    }

   private:
    static constexpr int W = Simd<T>::W;
    static constexpr T INF = std::numeric_limits<T>::infinity();

    // λ, g, g_v and δ of far key f of each cluster.
    void read_far_keys(int64_t f) {
        const int64_t width = keys_.width, value_width = keys_.value_width;
        T* slopes = scratch_.query_rows.get(n_ * width);
        for (int64_t i = 0; i < n_; ++i) {
            const int64_t at = (first_cluster_ + i) * params_.n_far + f;
            const T* far_key = part<T>(params_.far_keys, row_, at * width);
            const T* far_value = part<T>(params_.far_values, row_, at * value_width);
            const T d_bias = *part<T>(params_.d_far_bias, row_, at),
                    *d_key = part<T>(params_.d_far_keys, row_, at * width);
            T* slope = slopes + i * width;
            for (int64_t d = 0; d < width; ++d) slope[d] = d_key[d] - d_bias * centroids_[i][d];
            key_slopes_[i] = slope, value_slopes_[i] = part<T>(params_.d_far_values, row_, at * value_width);
            delta_[i] = dot(key_slopes_[i], far_key, width) + dot(value_slopes_[i], far_value, value_width) - d_bias;
            const T lse = *part<T>(params_.far_bias, row_, at) + dot(centroids_[i], far_key, width);
            lse_[i] = lse == -INF ? INF : lse * T(LOG2_E);  // nothing was folded: 2^(S − inf) is zero
        }
        for (int64_t i = n_; i < columns_; ++i) lse_[i] = INF, delta_[i] = T(0);
        packed_key_slopes_ = scratch_.grads.get((width + value_width) * QUERY_BLOCK);
        packed_value_slopes_ = packed_key_slopes_ + width * QUERY_BLOCK;
        pack_columns(key_slopes_, n_, width, T(1), packed_key_slopes_);
        pack_columns(value_slopes_, n_, value_width, T(1), packed_value_slopes_);
    }

    // P and P (g·k + g_v·v − δ) of the candidates that were looked up, start … start + size − 1.
    void weigh(int64_t start, int64_t size, int64_t* next) {
        const auto multiply = [&](const T* const* rows, const T* packed, int64_t inner, T* to) {
            product<T>(Scattered<T>{rows}, size, 1, Strided<T>{packed, QUERY_BLOCK}, columns_, inner,
                       Store<T>{to, QUERY_BLOCK}, scratch_.prefetch);
        };
        multiply(candidates_.keys(), packed_, keys_.width, weights_);
        multiply(candidates_.keys(), packed_key_slopes_, keys_.width, dscores_);
        const T** values = scratch_.pointers[2].get(KEY_BLOCK);
        T* of_values = scratch_.key_rows.get(KEY_BLOCK * QUERY_BLOCK);
        const Scattered<T> whole =
            whole_vectors(candidates_.values(), size, keys_.value_width, values, scratch_.values);
        multiply(whole.rows, packed_value_slopes_, keys_.value_width, of_values);
        for (int64_t i = 0; i < n_; ++i)
            for (; next[i] < params_.n_near && kept_[i][next[i]] < start + size; ++next[i])
                if (kept_[i][next[i]] >= start) weights_[(kept_[i][next[i]] - start) * QUERY_BLOCK + i] = -INF;
        for (int64_t j = 0; j < size; ++j) {
            T *w = weights_ + j * QUERY_BLOCK, *d = dscores_ + j * QUERY_BLOCK;
            const T* of_value = of_values + j * QUERY_BLOCK;
            for (int64_t i = 0; i < columns_; i += W) {
                // Rounding of huge scores can put S above λ: a weight is 1 at most.
                const Vec<T> weight = power(lesser<T>(load(w + i) - load(lse_ + i), Vec<T>{}));
                store(w + i, weight);
                store(d + i, weight * (load(d + i) + load(of_value + i) - load(delta_ + i)));
            }
        }
    }

    // Adds Σ P g + dS q̄ to the keys' gradients, Σ P g_v to those of the values.
    void add(int64_t size, T* dk, T* dv) {
        const int64_t width = keys_.width, value_width = keys_.value_width;
        T *dk_rows[KEY_BLOCK], *dv_rows[KEY_BLOCK];
        for (int64_t j = 0; j < size; ++j) {
            const bool hidden = candidates_.place(j) < 0;
            dk_rows[j] = hidden ? nullptr : dk + candidates_.key(j) * width;
            dv_rows[j] = hidden ? nullptr : dv + candidates_.key(j) * value_width;
        }
        const auto accumulate = [&](const T* weights, const T* const* rows, int64_t columns, T* const* to) {
            const T** list = scratch_.pointers[3].get(QUERY_BLOCK);
            product<T>(Strided<T>{weights, QUERY_BLOCK}, size, 1,
                       whole_vectors(rows, n_, columns, list, scratch_.grad_rows), round_up(columns, W), n_,
                       Merge<T>{to, ones_, ones_, columns}, scratch_.prefetch);
        };
        accumulate(weights_, key_slopes_, width, dk_rows);
        accumulate(dscores_, centroids_, width, dk_rows);
        accumulate(weights_, value_slopes_, value_width, dv_rows);
    }

    const LevelGradients& params_;
    const CandidateKeys& keys_;
    Candidates<T> candidates_;
    const int64_t n_, columns_, row_;
    const int64_t first_cluster_;  // of the row
    Scratch<T>& scratch_;
    const T *centroids_[QUERY_BLOCK], *key_slopes_[QUERY_BLOCK], *value_slopes_[QUERY_BLOCK];
    const int32_t* kept_[QUERY_BLOCK];
    alignas(64) T lse_[QUERY_BLOCK], delta_[QUERY_BLOCK], ones_[KEY_BLOCK];
    T *packed_, *packed_key_slopes_, *packed_value_slopes_, *weights_, *dscores_;
};

template <class T>
void fold_level_backward(const LevelGradients& params) {
    const CandidateKeys& keys = params.keys;
    const int64_t n_rows = keys.batch * keys.heads, n_kv = keys.batch * keys.kv_heads;
    if (n_rows * keys.n_parents == 0) return;
    const int64_t repeat = keys.heads / keys.kv_heads, parents_per_row = keys.n_parents / n_rows;
    const int64_t dk_size = keys.n_keys * keys.width, dv_size = keys.n_keys * keys.value_width;
    // The rows of a key head add to the same gradients, in a fixed order. Few key heads are cut into parts of their
    // candidates, each with its own sums unless no key is in two parts. The number of parts depends only on shapes:
    // results do not depend on the number of threads.
    const int64_t n_parts =
        n_kv >= 8 ? 1 : std::min<int64_t>(8 / n_kv, (keys.n_candidates + KEY_BLOCK - 1) / KEY_BLOCK);
    const bool is_apart = repeat == 1 && keys.candidates == nullptr;
    const int64_t n_own = is_apart ? 0 : n_parts - 1;
    std::unique_ptr<T[]> own(new T[n_own * n_kv * (dk_size + dv_size)]());
    const auto sums = [&](int64_t kv, int64_t part, bool values) {
        T* to = part == 0 || is_apart
                    ? typed<T>(values ? params.dv : params.dk) + kv * (values ? dv_size : dk_size)
                    : own.get() + ((part - 1) * n_kv + kv) * (dk_size + dv_size) + (values ? dk_size : 0);
        return to;
    };
    run(n_kv * n_parts, params.execution.threads, [&](int64_t task) {
        const int64_t kv = task / n_parts, part = task % n_parts;
        const int64_t begin = keys.n_candidates * part / n_parts, end = keys.n_candidates * (part + 1) / n_parts;
        T *dk = sums(kv, part, false), *dv = sums(kv, part, true);
        for (int64_t parent = kv * repeat * parents_per_row; parent < (kv + 1) * repeat * parents_per_row; ++parent)
            for (int64_t first = 0; first < keys.fan_out; first += QUERY_BLOCK)
                FoldGradient<T>(params, parent, first, std::min<int64_t>(QUERY_BLOCK, keys.fan_out - first))
                    .run(begin, end, dk, dv);
    });
    if (n_own == 0) return;
    run(n_kv, params.execution.threads, [&](int64_t kv) {
        for (int64_t part = 1; part < n_parts; ++part)
            for (const bool values : {false, true}) {
                T* to = sums(kv, 0, values);
                const T* from = sums(kv, part, values);
                for (int64_t i = 0; i < (values ? dv_size : dk_size); ++i) to[i] += from[i];
            }
    });
}

}  // namespace smyrf::SMYRF_ISA
