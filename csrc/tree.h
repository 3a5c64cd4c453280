// One binary tree over the queries and keys of a row.
//
// A node splits its queries at the median along their main direction, and its keys along the same one: branch i of the
// queries and branch i of the keys belong together. Vectors are seen in the few directions of directions.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "directions.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

constexpr int64_t NODE_SAMPLES = 256;
constexpr int POWER_STEPS = 6;

// Queries or keys on their way through the tree: coordinates and numbers, in the present order and in the next.
template <class T>
struct Branches {
    Buffer<T> coordinates[2];
    Buffer<int32_t> number[2];
    int64_t n = 0;  // with the copies that make all leaves equal

    T* x(int side) { return coordinates[side].data(); }
    int32_t* order(int side) { return number[side].data(); }
};

template <class T>
class TreeRow {
   public:
    TreeRow(const TreeParams& params, int64_t row)
        : params_(params),
          rank_(std::min(params.rank, params.width)),
          columns_(round_up(rank_, Simd<T>::W)),
          row_(row) {
        const int64_t batch = row / params.heads, head = row % params.heads;
        q_ = head_of<T>(params.q, batch, head);
        k_ = head_of<T>(params.k, batch, head / (params.heads / params.kv_heads));
        mask_ = params.key_mask == nullptr ? nullptr : params.key_mask + batch * params.n_keys;
    }

    void run() {
        Memory& memory = Memory::mine();
        find_directions(memory);
        place(memory.queries, q_, params_.q.row_stride, params_.n_queries, nullptr, memory);
        place(memory.keys, k_, params_.k.row_stride, params_.n_keys, mask_, memory);
        int side = 0;
        for (int64_t n_nodes = 1; n_nodes < params_.n_leaves; n_nodes *= 2, side = 1 - side)
            for (int64_t node = 0; node < n_nodes; ++node) split(memory, node, n_nodes, side);
        write(memory, side);
        memory.trim();
    }

   private:
    static constexpr int W = Simd<T>::W;

    // What one thread needs.
    struct Memory {
        Branches<T> queries, keys;
        Buffer<T> sample, directions, direction, values, ranks;
        Buffer<double> sigma_q, sigma_k, w, iteration;
        Buffer<int32_t> valid;

        static Memory& mine() {
            static thread_local Memory memory;
            return memory;
        }
        void trim() {
            for (Branches<T>* one : {&queries, &keys})
                for (int i = 0; i < 2; ++i) one->coordinates[i].trim(), one->number[i].trim();
            values.trim(), ranks.trim(), valid.trim();
        }
    };

    // W (D, r), padded with zeros to whole vectors.
    void find_directions(Memory& memory) {
        const int64_t width = params_.width;
        double *sigma_q = memory.sigma_q.get(width * width), *sigma_k = memory.sigma_k.get(width * width);
        const int64_t q_step = std::max<int64_t>(1, params_.n_queries / COVARIANCE_SAMPLES) * params_.q.row_stride;
        const int64_t n_q = sampled(params_.n_queries);
        covariance<T>([&](int64_t i) { return q_ + i * q_step; }, n_q, width, memory.sample, sigma_q);
        int32_t* valid = memory.valid.get(params_.n_keys);
        n_valid_ = 0;
        for (int64_t j = 0; j < params_.n_keys; ++j)
            if (mask_ == nullptr || mask_[j]) valid[n_valid_++] = static_cast<int32_t>(j);
        const int64_t k_step = std::max<int64_t>(1, n_valid_ / COVARIANCE_SAMPLES);
        covariance<T>([&](int64_t j) { return k_ + valid[j * k_step] * params_.k.row_stride; }, sampled(n_valid_),
                      width, memory.sample, sigma_k);
        double* w = memory.w.get(width * rank_);
        subspace(sigma_q, sigma_k, width, rank_, memory.iteration, w);
        T* to = memory.directions.get(width * columns_);
        for (int64_t d = 0; d < width; ++d)
            for (int64_t r = 0; r < columns_; ++r)
                to[d * columns_ + r] = r < rank_ ? static_cast<T>(w[d * rank_ + r]) : T(0);
    }
    // How many of n vectors a covariance is estimated from.
    static int64_t sampled(int64_t n) {
        const int64_t step = std::max<int64_t>(1, n / COVARIANCE_SAMPLES);
        return (n + step - 1) / step;
    }

    // Coordinates of n vectors at the places of all leaves. Copies, evenly spread, fill up a length that the number of
    // leaves does not divide. A masked key goes where some valid one goes, so that all branches have their share.
    void place(Branches<T>& to, const T* vectors, int64_t stride, int64_t n, const bool* mask, Memory& memory) {
        to.n = params_.n_leaves * ((n + params_.n_leaves - 1) / params_.n_leaves);
        for (int i = 0; i < 2; ++i) to.coordinates[i].get(to.n * columns_), to.number[i].get(to.n);
        T *found = to.x(1), *x = to.x(0);
        Prefetch none;
        product<T>(Strided<T>{vectors, stride}, n, 1, Strided<T>{memory.directions.data(), columns_}, columns_,
                   params_.width, Store<T>{found, columns_}, none);
        for (int64_t i = 0; i < n; ++i) {
            T sum = 0;
            for (int64_t r = 0; r < columns_; ++r) sum += found[i * columns_ + r];
            if (!(sum - sum == T(0)))
                project_finite(vectors + i * stride, memory.directions.data(), found + i * columns_);
        }
        const int32_t* valid = memory.valid.data();
        for (int64_t i = 0; i < to.n; ++i) {
            const int64_t source = i * n / to.n;
            const bool stands_in = mask != nullptr && !mask[source] && n_valid_ > 0;
            const int64_t from = stands_in ? valid[source % n_valid_] : source;
            std::memcpy(x + i * columns_, found + from * columns_, columns_ * sizeof(T));
            to.order(0)[i] = static_cast<int32_t>(i);
        }
    }
    void project_finite(const T* vector, const T* directions, T* to) const {
        std::fill_n(to, columns_, T(0));
        for (int64_t d = 0; d < params_.width; ++d)
            for (int64_t r = 0; r < columns_; ++r)
                to[r] += zero_unless_finite(vector[d]) * directions[d * columns_ + r];
    }

    void split(Memory& memory, int64_t node, int64_t n_nodes, int side) {
        T* direction = memory.direction.get(2 * columns_);
        main_direction(memory, node, n_nodes, side, direction, direction + columns_);
        partition(memory, memory.queries, node, n_nodes, side, direction);
        partition(memory, memory.keys, node, n_nodes, side, direction);
    }

    // The first principal direction of a node's queries, by power iteration on the Gram matrix of a sample.
    void main_direction(Memory& memory, int64_t node, int64_t n_nodes, int side, T* direction, T* next) {
        const int64_t size = memory.queries.n / n_nodes, step = std::max<int64_t>(1, size / NODE_SAMPLES);
        const int64_t n = (size + step - 1) / step;
        const T* x = memory.queries.x(side) + node * size * columns_;
        T* centred = memory.sample.get((n + 1 + rank_) * columns_);
        T *mean = centred + n * columns_, *gram = mean + columns_;
        std::fill_n(mean, columns_, T(0));
        for (int64_t i = 0; i < n; ++i)
            for (int64_t r = 0; r < columns_; r += W)
                store(mean + r, load(mean + r) + load(x + i * step * columns_ + r));
        for (int64_t r = 0; r < columns_; ++r) mean[r] /= static_cast<T>(n);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t r = 0; r < columns_; r += W)
                store(centred + i * columns_ + r, load(x + i * step * columns_ + r) - load(mean + r));
        Prefetch none;
        product<T>(Strided<T>{centred, 1}, rank_, columns_, Strided<T>{centred, columns_}, columns_, n,
                   Store<T>{gram, columns_}, none);
        int64_t largest = 0;
        T trace = 0;
        for (int64_t r = 0; r < rank_; ++r) {
            trace += gram[r * columns_ + r];
            if (gram[r * columns_ + r] > gram[largest * columns_ + largest]) largest = r;
        }
        // With eigenvalues of at most one a few steps cannot overflow, and the largest is at least 1 / rank.
        const T unit = T(1) / std::max(trace, std::numeric_limits<T>::min());
        for (int64_t r = 0; r < columns_; ++r) direction[r] = gram[largest * columns_ + r] * unit;
        for (int power = 0; power < POWER_STEPS; ++power) {
            std::fill_n(next, columns_, T(0));
            for (int64_t i = 0; i < rank_; ++i)
                for (int64_t r = 0; r < columns_; r += W)
                    store(next + r, load(next + r) + load(gram + i * columns_ + r) * (direction[i] * unit));
            std::memcpy(direction, next, columns_ * sizeof(T));
        }
    }

    // Sends the smaller half along the direction to the first branch, the larger to the second, each in its order. Of
    // those at the median the first go to the smaller half.
    void partition(Memory& memory, Branches<T>& all, int64_t node, int64_t n_nodes, int side, const T* direction) {
        const int64_t size = all.n / n_nodes, half = size / 2, first = node * size;
        const T* x = all.x(side) + first * columns_;
        T *values = memory.values.get(size), *ranks = memory.ranks.get(size);
        for (int64_t i = 0; i < size; ++i) {
            Vec<T> sum{};
            for (int64_t r = 0; r < columns_; r += W) sum += load(x + i * columns_ + r) * load(direction + r);
            T total = 0;
            for (int lane = 0; lane < W; ++lane) total += sum[lane];
            values[i] = total == total ? total : std::numeric_limits<T>::infinity();  // huge coordinates overflow
        }
        std::memcpy(ranks, values, size * sizeof(T));
        std::nth_element(ranks, ranks + half, ranks + size, Smaller());
        const T median = *largest_of(ranks, half);
        int64_t n_smaller = 0;
        for (int64_t i = 0; i < size; ++i) n_smaller += values[i] < median;
        int64_t n_equal = half - n_smaller;  // of those at the median that go to the smaller half
        T* to = all.x(1 - side) + first * columns_;
        const int32_t* order = all.order(side) + first;
        int32_t* to_order = all.order(1 - side) + first;
        int64_t at[2] = {0, half};
        for (int64_t i = 0; i < size; ++i) {
            const bool is_smaller = values[i] < median || (values[i] == median && n_equal-- > 0);
            int64_t& place = at[is_smaller ? 0 : 1];
            for (int64_t r = 0; r < columns_; r += W) store(to + place * columns_ + r, load(x + i * columns_ + r));
            to_order[place++] = order[i];
        }
    }
    // For std::nth_element; std::less would not be of this namespace, see isa.h.
    struct Smaller {
        bool operator()(T a, T b) const { return a < b; }
    };
    static const T* largest_of(const T* values, int64_t n) {
        const T* found = values;
        for (int64_t i = 1; i < n; ++i)
            if (values[i] > *found) found = values + i;
        return found;
    }

    void write(Memory& memory, int side) {
        const int64_t n_queries = params_.n_queries, n_keys = params_.n_keys;
        Branches<T>&queries = memory.queries, &keys = memory.keys;
        int32_t* to = params_.queries + row_ * queries.n;
        bool* is_copy = params_.is_copy + row_ * queries.n;
        for (int64_t i = 0; i < queries.n; ++i) {
            const int64_t number = queries.order(side)[i], source = number * n_queries / queries.n;
            to[i] = static_cast<int32_t>(source);
            is_copy[i] = number > 0 && (number - 1) * n_queries / queries.n == source;
        }
        int32_t *key = params_.keys + row_ * n_keys, *leaf = params_.leaf_of_key + row_ * n_keys;
        for (int64_t i = 0; i < keys.n; ++i) {
            const int64_t number = keys.order(side)[i], source = number * n_keys / keys.n;
            if (number > 0 && (number - 1) * n_keys / keys.n == source) continue;  // a copy
            *key++ = static_cast<int32_t>(source);
            *leaf++ = static_cast<int32_t>(i / (keys.n / params_.n_leaves));
        }
    }

    const TreeParams& params_;
    const int64_t rank_, columns_, row_;
    const T *q_, *k_;
    const bool* mask_;
    int64_t n_valid_ = 0;
};

template <class T>
void build_tree(const TreeParams& params) {
    run(params.batch * params.heads, params.execution.threads, [&](int64_t row) { TreeRow<T>(params, row).run(); });
}

}  // namespace smyrf::SMYRF_ISA
