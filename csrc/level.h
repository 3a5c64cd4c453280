// One level of Tangent attention: each cluster scores its candidates, keeps the best as near keys and folds the others
// into far keys.
//
// Scores are computed twice, a block at a time, rather than stored: once to find the best, once to fold the rest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "candidates.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"
#include "softmax.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

// Up to QUERY_BLOCK clusters below one parent (columns) and the candidates of the parent (rows).
template <class T>
class LevelBlock {
   public:
    LevelBlock(const LevelParams& params, int64_t parent, int64_t first, int64_t n)
        : params_(params),
          keys_(params.keys),
          candidates_(params.keys, parent),
          n_(n),
          columns_(round_up(n, W)),
          row_(candidates_.row()),
          first_cluster_(parent * keys_.fan_out % clusters_per_row() + first),
          scratch_(Scratch<T>::mine()) {
        leaf_of_key_ = params.leaf_of_key + row_ * keys_.n_keys;
        key_spread_ = typed<T>(params.key_spread) + row_ * keys_.n_keys;
        value_weight_ = typed<T>(params.value_weight) + row_ * keys_.n_keys;
        centroids_ = typed<T>(keys_.centroids) + (parent * keys_.fan_out + first) * keys_.width;
        const T* spread = typed<T>(params.spread) + parent * keys_.fan_out + first;
        const T* rows[QUERY_BLOCK];
        for (int64_t i = 0; i < n; ++i) {
            rows[i] = centroids_ + i * keys_.width;
            spread_[i] = 3 * T(LOG2_E) * spread[i];
        }
        for (int64_t i = n; i < columns_; ++i) spread_[i] = 0;
        scratch_.prefetch.clear();
        packed_ = scratch_.queries.get(keys_.width * QUERY_BLOCK);
        pack_columns(rows, n, keys_.width, T(LOG2_E), packed_);
        scores_ = scratch_.scores.get(KEY_BLOCK * QUERY_BLOCK);
    }

    void run() {
        select();
        fold();
    }

   private:
    static constexpr int W = Simd<T>::W;
    static constexpr T INF = std::numeric_limits<T>::infinity();
    static constexpr size_t MAX_KEPT_HITS = 1 << 14;

    struct Hit {
        T rank;
        int32_t candidate;
    };
    // For std::nth_element; std::greater would not be of this namespace, see isa.h.
    struct Larger {
        bool operator()(T a, T b) const { return a > b; }
    };

    int64_t clusters_per_row() const { return keys_.n_parents * keys_.fan_out / (keys_.batch * keys_.heads); }
    int32_t* kept(int64_t i) const { return part<int32_t>(params_.kept, row_, (first_cluster_ + i) * params_.n_near); }

    // Scores of the n candidates that were looked up, in base 2. Those of masked ones are 0.
    void score(int64_t n) {
        product<T>(Scattered<T>{candidates_.keys()}, n, 1, Strided<T>{packed_, QUERY_BLOCK}, columns_, keys_.width,
                   Store<T>{scores_, QUERY_BLOCK}, scratch_.prefetch);
    }

    // Turns the scores of candidate j into ranks: T + 3σ + ½ log ‖v − v̄‖². A cluster's own keys come before all others,
    // masked keys last.
    void rank(int64_t j) {
        T* scores = scores_ + j * QUERY_BLOCK;
        const int32_t place = candidates_.place(j);
        if (place < 0) {
            for (int64_t i = 0; i < columns_; i += W) store(scores + i, fill(-INF));
            return;
        }
        const T spread = key_spread_[place], weight = T(LOG2_E) * value_weight_[place];
        for (int64_t i = 0; i < columns_; i += W)
            store(scores + i, load(scores + i) + load(spread_ + i) * spread + weight);
        if (params_.leaves_per_cluster == 0) return;
        const int64_t own = leaf_of_key_[place] / params_.leaves_per_cluster - first_cluster_;
        if (own >= 0 && own < n_ && scores[own] != -INF) scores[own] = INF;
    }

    // A bound for each cluster that slightly more than n_near candidates are expected to reach, from a sample.
    void find_bounds(T* bounds) {
        const double expected = static_cast<double>(params_.n_near) * KEY_BLOCK / keys_.n_candidates;
        const int64_t at = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 2);
        std::fill(bounds, bounds + QUERY_BLOCK, -INF);
        if (keys_.n_candidates < 4 * KEY_BLOCK || at >= KEY_BLOCK) return;
        candidates_.look_up_sample();
        score(KEY_BLOCK);
        for (int64_t j = 0; j < KEY_BLOCK; ++j) rank(j);
        T sample[KEY_BLOCK];
        for (int64_t i = 0; i < n_; ++i) {
            for (int64_t j = 0; j < KEY_BLOCK; ++j) sample[j] = nan_as_inf(scores_[j * QUERY_BLOCK + i]);
            std::nth_element(sample, sample + at, sample + KEY_BLOCK, Larger());
            bounds[i] = sample[at];
        }
        std::fill(bounds + n_, bounds + QUERY_BLOCK, INF);
    }

    static T nan_as_inf(T x) { return x == x ? x : INF; }

    // Candidates that reach the bounds, ascending.
    void collect(const T* bounds) {
        const int64_t most = block_size(keys_.n_candidates, KEY_BLOCK);
        for (int64_t start = 0; start < keys_.n_candidates; start += most) {
            const int64_t size = std::min(most, keys_.n_candidates - start);
            candidates_.look_up(start, size);
            candidates_.prefetch(start + size, most, false, scratch_.prefetch);
            score(size);
            for (int64_t j = 0; j < size; ++j) {
                rank(j);
                const T* ranks = scores_ + j * QUERY_BLOCK;
                for (int64_t i = 0; i < columns_; i += W)
                    for (uint32_t found = ~lanes<T>(load(ranks + i) < load(bounds + i)) & all_lanes(i); found != 0;
                         found &= found - 1) {
                        const int64_t column = i + __builtin_ctz(found);
                        hits()[column].push_back({nan_as_inf(ranks[column]), static_cast<int32_t>(start + j)});
                    }
            }
        }
    }
    uint32_t all_lanes(int64_t i) const {
        const int64_t n = std::min<int64_t>(W, n_ - i);
        return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
    }
    static std::vector<Hit>* hits() {
        static thread_local std::vector<Hit> all[QUERY_BLOCK];
        return all;
    }

    // Writes the ascending numbers of each cluster's best candidates.
    void select() {
        const int64_t n_near = params_.n_near;
        if (n_near >= keys_.n_candidates) {
            for (int64_t i = 0; i < n_; ++i)
                for (int64_t s = 0; s < n_near; ++s) kept(i)[s] = static_cast<int32_t>(s);
            return;
        }
        alignas(64) T bounds[QUERY_BLOCK];
        for (int64_t i = 0; i < QUERY_BLOCK; ++i) hits()[i].clear();
        find_bounds(bounds);
        collect(bounds);
        bool again = false;  // if the sample was not like the rest
        for (int64_t i = 0; i < n_; ++i) {
            const bool enough = static_cast<int64_t>(hits()[i].size()) >= n_near;
            bounds[i] = enough ? INF : -INF;
            if (!enough) hits()[i].clear();
            again |= !enough;
        }
        if (again) collect_missing(bounds);
        static thread_local Buffer<T> memory;
        for (int64_t i = 0; i < n_; ++i) {
            const std::vector<Hit>& found = hits()[i];
            const int64_t n_found = static_cast<int64_t>(found.size());
            T* ranks = memory.get(n_found);
            for (int64_t j = 0; j < n_found; ++j) ranks[j] = found[j].rank;
            std::nth_element(ranks, ranks + (n_near - 1), ranks + n_found, Larger());
            const T last = ranks[n_near - 1];
            int64_t n_equal =
                std::count(ranks, ranks + n_near, last);  // of candidates with this rank the first are kept
            int32_t* to = kept(i);
            for (const Hit& hit : found)
                if (hit.rank > last || (hit.rank == last && n_equal-- > 0)) *to++ = hit.candidate;
            if (hits()[i].capacity() > MAX_KEPT_HITS) std::vector<Hit>().swap(hits()[i]);  // many ties, which are rare
        }
    }
    // All candidates of clusters whose bound is -inf; the others keep what they have.
    void collect_missing(const T* bounds) {
        std::vector<Hit> before[QUERY_BLOCK];
        for (int64_t i = 0; i < n_; ++i)
            if (bounds[i] > 0) before[i].swap(hits()[i]);
        collect(bounds);
        for (int64_t i = 0; i < n_; ++i)
            if (bounds[i] > 0) before[i].swap(hits()[i]);
    }

    // Far keys: each run of candidates that are not kept becomes one key with a bias and a value.
    void fold() {
        const int64_t n_far = params_.n_far, width = keys_.width, value_width = keys_.value_width;
        alignas(64) T top[QUERY_BLOCK], sum[QUERY_BLOCK], keep[QUERY_BLOCK], share[QUERY_BLOCK], state[2 * QUERY_BLOCK];
        int32_t identity[QUERY_BLOCK];
        int64_t next[QUERY_BLOCK] = {};  // the first kept candidate that was not met yet
        T *far_keys[QUERY_BLOCK], *far_values[QUERY_BLOCK];
        for (int64_t i = 0; i < QUERY_BLOCK; ++i) identity[i] = static_cast<int32_t>(i);
        for (int64_t f = 0; f < n_far; ++f) {
            const int64_t begin = f * keys_.n_candidates / n_far, end = (f + 1) * keys_.n_candidates / n_far;
            const int64_t most = block_size(end - begin, KEY_BLOCK);
            for (int64_t i = 0; i < n_; ++i) {
                const int64_t at = (first_cluster_ + i) * n_far + f;
                far_keys[i] = part<T>(params_.far_keys, row_, at * width);
                far_values[i] = part<T>(params_.far_values, row_, at * value_width);
                state[2 * i] = -INF, state[2 * i + 1] = 0;
            }
            for (int64_t start = begin; start < end; start += most) {
                const int64_t size = std::min(most, end - start);
                candidates_.look_up(start, size);
                candidates_.prefetch(start + size, most, true, scratch_.prefetch);
                score(size);
                if (candidates_.is_masked())
                    for (int64_t j = 0; j < size; ++j)
                        if (candidates_.place(j) < 0) std::fill_n(scores_ + j * QUERY_BLOCK, QUERY_BLOCK, -INF);
                for (int64_t i = 0; i < n_; ++i) {
                    const int32_t* its = kept(i);
                    for (; next[i] < params_.n_near && its[next[i]] < start + size; ++next[i])
                        scores_[(its[next[i]] - start) * QUERY_BLOCK + i] = -INF;
                }
                softmax<T>(scores_, size, columns_, top, sum);
                merge_shares<T>(identity, n_, n_, top, sum, state, keep, share);
                const T** whole = scratch_.pointers[2].get(KEY_BLOCK);
                product<T>(Strided<T>{scores_, 1}, n_, QUERY_BLOCK,
                           whole_vectors(candidates_.keys(), size, width, whole, scratch_.key_rows), round_up(width, W),
                           size, Merge<T>{far_keys, keep, share, width}, scratch_.prefetch);
                product<T>(Strided<T>{scores_, 1}, n_, QUERY_BLOCK,
                           whole_vectors(candidates_.values(), size, value_width, whole, scratch_.values),
                           round_up(value_width, W), size, Merge<T>{far_values, keep, share, value_width},
                           scratch_.prefetch);
            }
            for (int64_t i = 0; i < n_; ++i) {
                if (state[2 * i + 1] == T(0))
                    std::fill_n(far_keys[i], width, T(0)), std::fill_n(far_values[i], value_width, T(0));
                *part<T>(params_.far_bias, row_, (first_cluster_ + i) * n_far + f) =
                    state[2 * i] * T(LN_2) + std::log(state[2 * i + 1]) -
                    dot(centroids_ + i * width, static_cast<const T*>(far_keys[i]), width);
            }
        }
    }

    const LevelParams& params_;
    const CandidateKeys& keys_;
    Candidates<T> candidates_;
    const int64_t n_, columns_, row_;
    const int64_t first_cluster_;  // of the row
    Scratch<T>& scratch_;
    const int32_t* leaf_of_key_;
    const T *key_spread_, *value_weight_, *centroids_;
    alignas(64) T spread_[QUERY_BLOCK];
    T *packed_, *scores_;
};

template <class T>
void fold_level(const LevelParams& params) {
    const int64_t blocks = (params.keys.fan_out + QUERY_BLOCK - 1) / QUERY_BLOCK;
    run(params.keys.n_parents * blocks, params.execution.threads, [&](int64_t task) {
        const int64_t first = task % blocks * QUERY_BLOCK;
        LevelBlock<T>(params, task / blocks, first, std::min<int64_t>(QUERY_BLOCK, params.keys.fan_out - first)).run();
    });
}

}  // namespace smyrf::SMYRF_ISA
