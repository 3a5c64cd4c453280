// What the choice of near keys knows of a row: means and variances of the queries of each leaf, and how much each key
// and each value differs from the average one.
//
// Numbers that are not finite count as zero: they must not decide about the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "directions.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"

namespace smyrf::SMYRF_ISA {

// Sums of vectors and of their squares, coordinate by coordinate.
template <class T>
class Moments {
   public:
    Moments(int64_t width, T* sum, T* square) : width_(width), sum_(sum), square_(square) {
        std::fill_n(sum, width, T(0)), std::fill_n(square, width, T(0));
    }

    // Adds the vectors rows(0) … rows(n − 1).
    template <class Rows>
    void add(const Rows& rows, int64_t n) {
        constexpr int W = Simd<T>::W;
        for (int64_t i = 0; i < n; ++i) {
            const T* x = rows(i);
            int64_t d = 0;
            for (; d + W <= width_; d += W) {
                const Vec<T> one = load(x + d);
                store(sum_ + d, load(sum_ + d) + one);
                store(square_ + d, load(square_ + d) + one * one);
            }
            for (; d < width_; ++d) sum_[d] += x[d], square_[d] += x[d] * x[d];
        }
        T total = 0;
        for (int64_t d = 0; d < width_; ++d) total += sum_[d] - sum_[d];
        if (total == T(0)) return;
        std::fill_n(sum_, width_, T(0)), std::fill_n(square_, width_, T(0));  // again, without what is not finite
        for (int64_t i = 0; i < n; ++i)
            for (int64_t d = 0; d < width_; ++d) {
                const T one = zero_unless_finite(rows(i)[d]);
                sum_[d] += one, square_[d] += one * one;
            }
    }
    // Divides by a number of vectors.
    void divide(int64_t n) {
        for (int64_t d = 0; d < width_; ++d) sum_[d] /= static_cast<T>(n), square_[d] /= static_cast<T>(n);
    }

   private:
    int64_t width_;
    T *sum_, *square_;
};

template <class T>
inline T variance_of(T mean, T square) {
    const T found = square - mean * mean;
    return found > T(0) ? found : T(0);  // rounding
}

// Σ ((x − mean) · factor)², without the factor if that is null.
template <class T>
T squared_distance(const T* x, const T* mean, const T* factor, int64_t width) {
    constexpr int W = Simd<T>::W;
    Vec<T> sums{};
    int64_t d = 0;
    for (; d + W <= width; d += W) {
        Vec<T> away = load(x + d) - load(mean + d);
        if (factor != nullptr) away *= load(factor + d);
        sums += away * away;
    }
    T sum = 0;
    for (int lane = 0; lane < W; ++lane) sum += sums[lane];
    for (; d < width; ++d) {
        const T away = (x[d] - mean[d]) * (factor == nullptr ? T(1) : factor[d]);
        sum += away * away;
    }
    if (sum - sum == T(0)) return sum;
    sum = 0;
    for (d = 0; d < width; ++d) {
        const T away = (zero_unless_finite(x[d]) - mean[d]) * (factor == nullptr ? T(1) : factor[d]);
        sum += away * away;
    }
    return sum;
}

// The statistics of one row.
template <class T>
class RowStatistics {
   public:
    RowStatistics(const SelectParams& params, int64_t row) : params_(params) {
        const int64_t batch = row / params.heads, head = row % params.heads;
        const int64_t kv_head = head / (params.heads / params.kv_heads);
        q_ = head_of<T>(params.q, batch, head);
        k_ = head_of<T>(params.k, batch, kv_head), v_ = head_of<T>(params.v, batch, kv_head);
        mask_ = params.key_mask == nullptr ? nullptr : params.key_mask + batch * params.n_keys;
        queries_ = params.queries + row * params.n_leaves * params.leaf_size;
        order_ = params.order + row * params.n_keys;
    }

    // Means of the scaled queries of each leaf and of their squares, (L, D) each.
    void of_leaves(T* means, T* squares) const {
        const T scale = static_cast<T>(params_.scale);
        const int64_t width = params_.width;
        for (int64_t leaf = 0; leaf < params_.n_leaves; ++leaf) {
            T *mean = means + leaf * width, *square = squares + leaf * width;
            Moments<T> moments(width, mean, square);
            const int32_t* its = queries_ + leaf * params_.leaf_size;
            moments.add([&](int64_t i) { return q_ + its[i] * params_.q.row_stride; }, params_.leaf_size);
            moments.divide(params_.leaf_size);
            for (int64_t d = 0; d < width; ++d) mean[d] *= scale, square[d] *= scale * scale;
        }
    }

    // σ of q·k over the queries, from key to key: √Σ var_q (k − k̄)², relative to the average key, by place (M); and
    // the variances of the keys' coordinates (D).
    void of_keys(const T* means, const T* squares, T* spread, T* variance) const {
        const int64_t width = params_.width;
        Buffer<T>& memory = mine();
        T* of_queries = memory.get(4 * width);
        T *mean = of_queries + width, *square = mean + width, *factor = square + width;
        average(k_, params_.k.row_stride, width, MAX_SAMPLES, mean, square);
        T total = 0;
        for (int64_t d = 0; d < width; ++d) {
            T first = 0, second = 0;
            for (int64_t leaf = 0; leaf < params_.n_leaves; ++leaf)
                first += means[leaf * width + d], second += squares[leaf * width + d];
            const T n = static_cast<T>(params_.n_leaves);
            of_queries[d] = variance_of(first / n, second / n);
            variance[d] = variance_of(mean[d], square[d]);
            total += of_queries[d] * variance[d];
        }
        total = std::max(total, std::numeric_limits<T>::min());
        for (int64_t d = 0; d < width; ++d) factor[d] = std::sqrt(of_queries[d] / total);
        for (int64_t place = 0; place < params_.n_keys; ++place) {
            const int64_t key = order_[place];
            const bool hidden = mask_ != nullptr && !mask_[key];
            spread[place] = hidden ? T(0)
                                   : zero_unless_finite(std::sqrt(
                                         squared_distance(k_ + key * params_.k.row_stride, mean, factor, width)));
        }
    }

    // ½ log ‖v − v̄‖², relative to the average value and bounded below, by place (M).
    void of_values(T* weight) const {
        const int64_t width = params_.value_width, n_keys = params_.n_keys;
        Buffer<T>& memory = mine();
        T *mean = memory.get(2 * width), *square = mean + width;
        average(v_, params_.v.row_stride, width, params_.n_keys, mean, square);
        T total = 0;
        int64_t count = 0;
        for (int64_t place = 0; place < n_keys; ++place) {
            const int64_t key = order_[place];
            weight[place] = 0;
            if (mask_ != nullptr && !mask_[key]) continue;
            weight[place] = squared_distance<T>(v_ + key * params_.v.row_stride, mean, nullptr, width);
            total += weight[place], ++count;
        }
        const T typical = std::max(total / static_cast<T>(std::max<int64_t>(count, 1)), std::numeric_limits<T>::min());
        constexpr int W = Simd<T>::W;
        alignas(64) T part[W];
        for (int64_t place = 0; place < n_keys; place += W) {
            const int64_t n = std::min<int64_t>(W, n_keys - place);
            for (int64_t i = 0; i < W; ++i) part[i] = i < n ? weight[place + i] / typical + T(1e-4) : T(1);
            const Vec<T> found = logarithm<T>(load(part)) * T(0.5);
            for (int64_t i = 0; i < n; ++i) weight[place + i] = zero_unless_finite(found[i]);
        }
    }

   private:
    static constexpr int64_t MAX_SAMPLES = 1 << 13;  // of keys, for means and variances

    static Buffer<T>& mine() {
        static thread_local Buffer<T> memory;
        return memory;
    }
    // Means and mean squares of the vectors that are not masked, (width) each; without a mask, of at most twice
    // n_samples.
    void average(const T* vectors, int64_t stride, int64_t width, int64_t n_samples, T* mean, T* square) const {
        Moments<T> moments(width, mean, square);
        if (mask_ == nullptr) {
            const int64_t step = std::max<int64_t>(1, params_.n_keys / n_samples);
            const int64_t n = (params_.n_keys + step - 1) / step;
            moments.add([&](int64_t i) { return vectors + i * step * stride; }, n);
            moments.divide(n);
            return;
        }
        static thread_local Buffer<int32_t> memory;
        int32_t* valid = memory.get(params_.n_keys);
        int64_t n = 0;
        for (int64_t key = 0; key < params_.n_keys; ++key)
            if (mask_[key]) valid[n++] = static_cast<int32_t>(key);
        moments.add([&](int64_t i) { return vectors + valid[i] * stride; }, n);
        moments.divide(std::max<int64_t>(n, 1));
        memory.trim();
    }

    const SelectParams& params_;
    const T *q_, *k_, *v_;
    const bool* mask_;
    const int32_t *queries_, *order_;
};

}  // namespace smyrf::SMYRF_ISA
