// Near and far keys of all levels of Tangent attention, forward and backward.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "fold_backward.h"
#include "isa.h"
#include "level.h"
#include "memory.h"
#include "params.h"
#include "statistics.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

// The levels of a call, one after the other, and the candidates of each: all keys at first, then those that the level
// above has kept.
class Descent {
   public:
    template <class Params>
    explicit Descent(const Params& params)
        : levels_(params.levels), n_rows_(params.batch * params.heads), n_keys_(params.n_keys) {
        keys_.batch = params.batch, keys_.heads = params.heads, keys_.kv_heads = params.kv_heads;
        keys_.n_keys = params.n_keys, keys_.width = params.width, keys_.value_width = params.value_width;
        keys_.k = params.k, keys_.v = params.v, keys_.key_mask = params.key_mask, keys_.order = params.order;
        keys_.n_parents = n_rows_, keys_.n_candidates = n_keys_;
        keys_.fan_out = levels_.empty() ? 1 : levels_[0].n_clusters;
    }

    bool done() const { return number_ == levels_.n; }
    const LevelSizes& level() const { return levels_[number_]; }
    const CandidateKeys& keys() const { return keys_; }

    // This level's part of a tensor in which each cluster has n numbers, or each of its far or near keys.
    Part of_clusters(const Part& all, int64_t size, int64_t n) const { return from(all, size, first_cluster_ * n); }
    Part of_far_keys(const Part& all, int64_t size, int64_t n) const { return from(all, size, first_far_ * n); }
    Part of_near_keys(const Part& all) const { return from(all, sizeof(int32_t), first_near_); }

    // Goes on to the next level, with what this one has kept (B, L, S) as its candidates.
    void next(const Part& kept, int threads) {
        const LevelSizes& now = level();
        const int64_t n_clusters = n_rows_ * now.n_clusters, n_near = now.n_near;
        std::unique_ptr<int32_t[]> places(new int32_t[n_clusters * n_near]);
        run(n_rows_, threads, [&](int64_t row) {
            for (int64_t i = 0; i < now.n_clusters; ++i) {
                const int64_t cluster = row * now.n_clusters + i;
                const int32_t* its = part<int32_t>(kept, row, i * n_near);
                const int32_t* above =
                    places_ == nullptr ? nullptr : places_.get() + cluster / keys_.fan_out * keys_.n_candidates;
                for (int64_t s = 0; s < n_near; ++s)
                    places[cluster * n_near + s] = above == nullptr ? its[s] : above[its[s]];
            }
        });
        places_.swap(places);
        first_cluster_ += now.n_clusters, first_far_ += now.n_clusters * now.n_far;
        first_near_ += now.n_clusters * n_near;
        ++number_;
        keys_.n_parents = n_clusters, keys_.n_candidates = n_near, keys_.candidates = places_.get();
        if (!done()) keys_.fan_out = level().n_clusters / now.n_clusters;
    }

    void set_centroids(const void* centroids) { keys_.centroids = centroids; }

   private:
    static Part from(const Part& all, int64_t size, int64_t first) {
        return {static_cast<char*>(all.address) + first * size, all.row_stride};
    }

    const Span<LevelSizes> levels_;
    const int64_t n_rows_, n_keys_;
    CandidateKeys keys_;
    int64_t number_ = 0;
    int64_t first_cluster_ = 0, first_far_ = 0, first_near_ = 0;
    std::unique_ptr<int32_t[]> places_;  // (A, n)
};

template <class T>
void select_and_fold(const SelectParams& params) {
    const int threads = params.execution.threads;
    const int64_t n_rows = params.batch * params.heads, width = params.width, n_leaves = params.n_leaves;
    if (n_rows == 0) return;
    std::unique_ptr<T[]> means(new T[n_rows * n_leaves * width]), squares(new T[n_rows * n_leaves * width]);
    std::unique_ptr<T[]> key_spread(new T[n_rows * params.n_keys]), value_weight(new T[n_rows * params.n_keys]);
    std::unique_ptr<T[]> key_variance(new T[n_rows * width]);
    run(n_rows, threads, [&](int64_t row) {
        const RowStatistics<T> statistics(params, row);
        T *mean = means.get() + row * n_leaves * width, *square = squares.get() + row * n_leaves * width;
        statistics.of_leaves(mean, square);
        statistics.of_keys(mean, square, key_spread.get() + row * params.n_keys, key_variance.get() + row * width);
        statistics.of_values(value_weight.get() + row * params.n_keys);
    });
    std::unique_ptr<T[]> centroids(new T[n_rows * n_leaves * width]), spread(new T[n_rows * n_leaves]);
    Descent descent(params);
    for (; !descent.done();) {
        const LevelSizes& level = descent.level();
        const int64_t per_cluster = n_leaves / level.n_clusters;
        const Part saved = descent.of_clusters(params.centroids, sizeof(T), width);
        run(n_rows, threads, [&](int64_t row) {
            const T* variance = key_variance.get() + row * width;
            static thread_local Buffer<T> memory;
            T* square = memory.get(width);
            for (int64_t i = 0; i < level.n_clusters; ++i) {
                T* mean = part<T>(saved, row, i * width);
                std::fill_n(mean, width, T(0)), std::fill_n(square, width, T(0));
                for (int64_t leaf = i * per_cluster; leaf < (i + 1) * per_cluster; ++leaf) {
                    const int64_t at = (row * n_leaves + leaf) * width;
                    for (int64_t d = 0; d < width; ++d) mean[d] += means[at + d], square[d] += squares[at + d];
                }
                T total = 0;
                for (int64_t d = 0; d < width; ++d) {
                    mean[d] /= static_cast<T>(per_cluster), square[d] /= static_cast<T>(per_cluster);
                    total += variance_of(mean[d], square[d]) * variance[d];
                }
                const int64_t cluster = row * level.n_clusters + i;
                std::memcpy(centroids.get() + cluster * width, mean, width * sizeof(T));
                spread[cluster] = zero_unless_finite(std::sqrt(total));
            }
        });
        descent.set_centroids(centroids.get());
        LevelParams one;
        one.execution = params.execution, one.keys = descent.keys();
        one.n_near = level.n_near, one.n_far = level.n_far;
        one.leaf_of_key = params.leaf_of_key;
        one.key_spread = key_spread.get(), one.value_weight = value_weight.get(), one.spread = spread.get();
        // A cluster's own keys come first where its leaves' keys fit twice into what it keeps.
        const int64_t keys_per_leaf = (params.n_keys + n_leaves - 1) / n_leaves;
        one.leaves_per_cluster = 2 * keys_per_leaf * per_cluster <= level.n_near ? per_cluster : 0;
        one.kept = descent.of_near_keys(params.kept);
        one.far_keys = descent.of_far_keys(params.far_keys, sizeof(T), width);
        one.far_values = descent.of_far_keys(params.far_values, sizeof(T), params.value_width);
        one.far_bias = descent.of_far_keys(params.far_bias, sizeof(T), 1);
        fold_level<T>(one);
        descent.next(one.kept, threads);
    }
    const int64_t n_near = n_leaves * params.levels.back().n_near;
    run(n_rows, threads, [&](int64_t row) {
        const int32_t *places = descent.keys().candidates + row * n_near, *order = params.order + row * params.n_keys;
        const bool* mask = params.key_mask == nullptr ? nullptr : params.key_mask + row / params.heads * params.n_keys;
        int32_t* near = params.near + row * n_near;
        for (int64_t i = 0; i < n_near; ++i) {
            const int32_t key = order[places[i]];
            near[i] = mask != nullptr && !mask[key] ? -1 : key;
        }
    });
}

template <class T>
void select_and_fold_backward(const SelectGradients& params) {
    const int64_t n_rows = params.batch * params.heads, width = params.width;
    if (n_rows == 0) return;
    int64_t most = 0;
    for (const LevelSizes& level : params.levels) most = std::max(most, level.n_clusters);
    std::unique_ptr<T[]> centroids(new T[n_rows * most * width]);
    Descent descent(params);
    for (; !descent.done();) {
        const LevelSizes& level = descent.level();
        const Part saved = descent.of_clusters(params.centroids, sizeof(T), width);
        for (int64_t row = 0; row < n_rows; ++row)
            std::memcpy(centroids.get() + row * level.n_clusters * width, part<T>(saved, row, 0),
                        level.n_clusters * width * sizeof(T));
        descent.set_centroids(centroids.get());
        LevelGradients one;
        one.execution = params.execution, one.keys = descent.keys();
        one.n_near = level.n_near, one.n_far = level.n_far;
        one.kept = descent.of_near_keys(params.kept);
        const auto keys = [&](const Part& all) { return descent.of_far_keys(all, sizeof(T), width); };
        const auto values = [&](const Part& all) { return descent.of_far_keys(all, sizeof(T), params.value_width); };
        const auto biases = [&](const Part& all) { return descent.of_far_keys(all, sizeof(T), 1); };
        one.far_keys = keys(params.far_keys), one.d_far_keys = keys(params.d_far_keys);
        one.far_values = values(params.far_values), one.d_far_values = values(params.d_far_values);
        one.far_bias = biases(params.far_bias), one.d_far_bias = biases(params.d_far_bias);
        one.dk = params.dk, one.dv = params.dv;
        fold_level_backward<T>(one);
        descent.next(one.kept, params.execution.threads);
    }
}

}  // namespace smyrf::SMYRF_ISA
