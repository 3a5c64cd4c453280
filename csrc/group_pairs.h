// The keys of one group, and everything that belongs to its pairs: biases, causality, multiplicity, dropout.
//
// Scores are in base 2, S = log₂e · scale · q·k, so that a weight is 2^(S − …) without a multiplication.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "dropout.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"

namespace smyrf::SMYRF_ISA {

// The keys of one group: those that its slots name, then its far keys.
template <class T>
struct GroupKeys {
    Buffer<const T*> k, v;
    Buffer<T> bias;          // of far keys, in base 2
    Buffer<int64_t> slot;    // of a key: its key slot; of a far key: its row of the table
    Buffer<int64_t> number;  // of a key: its index; of a far key: M + group · F + f. Dropout counts by it
    int64_t n_listed = 0, size = 0;

    void reserve(int64_t n) { k.get(n), v.get(n), bias.get(n), slot.get(n), number.get(n); }

    static GroupKeys& mine() {
        static thread_local GroupKeys keys;
        return keys;
    }
};

// One of the B rows of a call.
template <class T>
struct AttendRow {
    const AttendParams& params;
    int64_t number;  // among the B
    const T *q, *k, *v;
    T scale;
    Dropout<T> dropout;

    AttendRow(const AttendParams& p, int64_t row)
        : params(p), number(row), scale(static_cast<T>(p.scale)), dropout(p.dropout_p) {
        const int64_t batch = row / p.heads, head = row % p.heads, kv_head = head / (p.heads / p.kv_heads);
        q = head_of<T>(p.q, batch, head), k = head_of<T>(p.k, batch, kv_head), v = head_of<T>(p.v, batch, kv_head);
    }
    const int32_t* queries(const GroupList& list, int64_t group) const {
        return list.queries + number * list.queries_row_stride + group * list.n_query_slots;
    }
    const int32_t* keys(const GroupList& list, int64_t group) const {
        return list.keys + number * list.keys_row_stride + group * list.n_key_slots;
    }

    // Finds the keys of a group. Slots and numbers of listed keys are only written with `details`.
    void collect(const GroupList& list, int64_t group, bool details, GroupKeys<T>& to) const {
        const FarKeys& far = list.far;
        to.reserve(list.n_key_slots + far.n_per_group);
        const int32_t* keys_of = keys(list, group);
        const T **to_k = to.k.data(), **to_v = to.v.data();
        int64_t n = 0;
        for (int64_t j = 0; j < list.n_key_slots; ++j) {
            const int64_t key = keys_of[j];
            if (key < 0) continue;
            to_k[n] = k + key * params.k.row_stride, to_v[n] = v + key * params.v.row_stride;
            if (details) to.slot[n] = j, to.number[n] = key;
            ++n;
        }
        to.n_listed = n;
        for (int64_t f = 0; f < far.n_per_group; ++f) {
            const int64_t place = group * far.n_per_group + f, in_table = far.index[place];
            const int64_t at = number * far.n_rows + in_table;
            const T bias = typed<T>(far.bias)[at];
            if (bias == -std::numeric_limits<T>::infinity()) continue;
            to_k[n] = typed<T>(far.keys) + at * params.width;
            to_v[n] = typed<T>(far.values) + at * params.value_width;
            to.bias[n] = bias * T(LOG2_E), to.slot[n] = in_table, to.number[n] = params.n_keys + place;
            ++n;
        }
        to.size = n;
    }

    // Queues the vectors of a group, and the rows of `out` into which it will be merged if that is not null.
    void prefetch(const GroupList& list, int64_t group, Prefetch& to, const T* out) const {
        constexpr int64_t SIZE = sizeof(T), CACHE = 1 << 18;
        const int64_t row_bytes = params.width * SIZE, value_bytes = params.value_width * SIZE;
        if ((params.n_queries + params.n_keys) * (row_bytes + value_bytes) <= CACHE) return;
        const int32_t *queries_of = queries(list, group), *keys_of = keys(list, group);
        to.add(q, params.q.row_stride * SIZE, row_bytes, queries_of, list.n_query_slots);
        to.add(k, params.k.row_stride * SIZE, row_bytes, keys_of, list.n_key_slots);
        to.add(v, params.v.row_stride * SIZE, value_bytes, keys_of, list.n_key_slots);
        if (out != nullptr) to.add(out, value_bytes, value_bytes, queries_of, list.n_query_slots);
    }
};

// The pairs of up to QUERY_BLOCK queries of a group and its keys.
template <class T>
struct Pairs {
    const AttendRow<T>& row;
    const GroupList& list;
    const GroupKeys<T>& keys;
    int64_t first, n;                       // query slots
    const int16_t* multiplicity = nullptr;  // (n, S)
    uint32_t by_query[QUERY_BLOCK];         // random numbers
    uint32_t stream = 0;

    Pairs(const AttendRow<T>& r, int64_t list_number, int64_t group, int64_t first_query, int64_t n_queries,
          const GroupKeys<T>& k)
        : row(r), list(r.params.lists[list_number]), keys(k), first(first_query), n(n_queries) {
        if (list.multiplicity != nullptr)
            multiplicity = list.multiplicity +
                           ((r.number * list.n_groups + group) * list.n_query_slots + first) * list.n_key_slots;
        if (!r.dropout.active) return;
        stream = dropout_stream(r.params.seed, list_number * r.params.batch * r.params.heads + r.number);
        const int32_t* queries = r.queries(list, group) + first;
        for (int64_t i = 0; i < QUERY_BLOCK; ++i)
            by_query[i] = i < n ? mix(static_cast<uint32_t>(queries[i]) ^ stream) : 0;
    }

    // The number of keys that any of the queries sees: they come first.
    int64_t n_seen() const {
        int64_t found = keys.size;
        if (list.causal)
            while (found > 0 && keys.slot[found - 1] > first + n - 1) --found;
        return found;
    }

    // The first of the queries that sees a key.
    int64_t first_seeing() const { return list.causal ? std::max<int64_t>(0, keys.slot[0] - first) : 0; }

    // The first key that `adjust` is for.
    int64_t first_adjusted() const { return list.causal || multiplicity != nullptr ? 0 : keys.n_listed; }

    // Adjusts the scores of key j: adds its bias, hides it from earlier queries, divides its weights by the
    // multiplicity.
    void adjust(int64_t j, T* scores, int64_t columns) const {
        constexpr int W = Simd<T>::W;
        if (j >= keys.n_listed) {
            for (int64_t i = 0; i < columns; i += W) store(scores + i, load(scores + i) + keys.bias[j]);
            return;
        }
        if (list.causal) {
            const int64_t hidden = std::min(columns, std::max<int64_t>(0, keys.slot[j] - first));
            for (int64_t i = 0; i < hidden; ++i) scores[i] = -std::numeric_limits<T>::infinity();
        }
        if (multiplicity != nullptr)
            for (int64_t i = 0; i < n; ++i) {
                const int16_t times = multiplicity[i * list.n_key_slots + keys.slot[j]];
                if (times > 1) scores[i] -= std::log2(T(times));
            }
    }

    // Dropout's factor of a pair.
    T dropout_factor(int64_t j, int64_t i) const {
        const uint32_t by_key = mix((static_cast<uint32_t>(keys.number[j]) + 0x5BD1E995u) ^ stream);
        return mix(by_query[i] ^ by_key) >= row.dropout.threshold ? row.dropout.scale : T(0);
    }
};

}  // namespace smyrf::SMYRF_ISA
