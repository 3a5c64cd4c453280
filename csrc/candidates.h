// The candidates of one cluster of the level above: some keys of a row, read where they are, through the order of the
// tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"

namespace smyrf::SMYRF_ISA {

template <class T>
class Candidates {
   public:
    Candidates(const CandidateKeys& params, int64_t parent)
        : params_(params), row_(parent / (params.n_parents / (params.batch * params.heads))) {
        const int64_t batch = row_ / params.heads, kv_head = row_ % params.heads / (params.heads / params.kv_heads);
        k_ = head_of<T>(params.k, batch, kv_head), v_ = head_of<T>(params.v, batch, kv_head);
        key_mask_ = params.key_mask == nullptr ? nullptr : params.key_mask + batch * params.n_keys;
        order_ = params.order + row_ * params.n_keys;
        places_of_ = params.candidates == nullptr ? nullptr : params.candidates + parent * params.n_candidates;
        Scratch<T>& scratch = Scratch<T>::mine();
        keys_ = scratch.pointers[0].get(KEY_BLOCK), values_ = scratch.pointers[1].get(KEY_BLOCK);
        zeros_ = scratch.zeros.get(params.width);
        std::memset(zeros_, 0, params.width * sizeof(T));
    }

    int64_t row() const { return row_; }
    bool is_masked() const { return key_mask_ != nullptr; }

    // Finds place, key and value of candidates start … start + n − 1.
    void look_up(int64_t start, int64_t n) {
        for (int64_t j = 0; j < n; ++j) look_up_one(j, start + j);
    }
    // … and of KEY_BLOCK candidates that are spread over all.
    void look_up_sample() {
        for (int64_t j = 0; j < KEY_BLOCK; ++j) look_up_one(j, j * params_.n_candidates / KEY_BLOCK);
    }

    // Of a candidate that was looked up: its place, -1 for a masked one, and its index.
    int32_t place(int64_t j) const { return places_[j]; }
    int64_t key(int64_t j) const { return order_[places_[j]]; }
    // Keys and values of all of them. A masked one is all zeros, whatever it holds, and its value is null.
    const T* const* keys() const { return keys_; }
    const T* const* values() const { return values_; }

    // Queues keys, and values if wanted, of candidates start … start + n − 1.
    void prefetch(int64_t start, int64_t n, bool values, Prefetch& to) const {
        constexpr int64_t SIZE = sizeof(T), CACHE = 1 << 18;
        const int64_t key_bytes = params_.width * SIZE, value_bytes = params_.value_width * SIZE;
        to.clear();
        n = std::min(n, params_.n_candidates - start);
        if (n <= 0 || params_.n_keys * (key_bytes + value_bytes) <= CACHE) return;
        int32_t keys[KEY_BLOCK];
        for (int64_t j = 0; j < n; ++j) keys[j] = order_[places_of_ == nullptr ? start + j : places_of_[start + j]];
        to.add(k_, params_.k.row_stride * SIZE, key_bytes, keys, n);
        if (values) to.add(v_, params_.v.row_stride * SIZE, value_bytes, keys, n);
    }

   private:
    void look_up_one(int64_t j, int64_t candidate) {
        const int32_t place = places_of_ == nullptr ? static_cast<int32_t>(candidate) : places_of_[candidate];
        const int64_t key = order_[place];
        const bool hidden = key_mask_ != nullptr && !key_mask_[key];
        places_[j] = hidden ? -1 : place;
        keys_[j] = hidden ? zeros_ : k_ + key * params_.k.row_stride;
        values_[j] = hidden ? nullptr : v_ + key * params_.v.row_stride;
    }

    const CandidateKeys& params_;
    const int64_t row_;
    const T *k_, *v_;
    const bool* key_mask_;
    const int32_t *order_, *places_of_;
    int32_t places_[KEY_BLOCK];
    const T **keys_, **values_;
    T* zeros_;
};

}  // namespace smyrf::SMYRF_ISA
