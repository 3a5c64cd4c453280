// What the calls are: plain numbers and pointers, no framework.
//
// Shapes: B rows (batch × heads), N queries, M keys, D width, E value width,
//         L groups, C query slots, S key slots and F extra keys per group.
#pragma once

#include <cstdint>
#include <vector>

namespace smyrf {

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// One tensor (batch, heads, length, width): the last axis is contiguous, strides are in elements.
template <class T>
struct Rows {
    T* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, stride = 0;
};

// One list of groups. Indices of -1 are empty slots.
template <class T>
struct List {
    int64_t n_groups = 0, slots = 0, size = 0, n_extra = 0;  // L, C, S, F
    const int32_t* queries = nullptr;                        // (B, L, C)
    const int32_t* keys = nullptr;                           // (B, L, S)
    int64_t queries_stride = 0, keys_stride = 0;             // of a row; 0 where all rows share them
    bool causal = false;
    const int16_t* repeats = nullptr;                          // (B, L, C, S) or null
    const T *extra_keys = nullptr, *extra_values = nullptr;    // (B, L, F, D), (B, L, F, E) or null
    const T* extra_bias = nullptr;                             // (B, L, F)
    T *d_extra_keys = nullptr, *d_extra_values = nullptr, *d_extra_bias = nullptr;  // backward writes them
};

template <class T>
struct Call {
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0, value_width = 0;
    Rows<const T> q, k, v;
    std::vector<List<T>> lists;
    T scale = 1;
    bool dropout = false;
    uint32_t threshold = 0;  // a weight is dropped if its hash is smaller
    T grow = 1;              // what is kept is multiplied by it
    int64_t seed = 0;
    int threads = 1;
};

// out (B, N, E) and lse (B, N), contiguous.
template <class T>
struct Forward {
    T *out = nullptr, *lse = nullptr;
};

// grad is (batch, heads, N, E); out, lse as Forward has left them; dq (B, N, D), dk (batch · kv_heads, M, D)
// and dv (…, M, E) are contiguous and zero.
template <class T>
struct Backward {
    Rows<const T> grad;
    const T *out = nullptr, *lse = nullptr;
    T *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

// q_order (B, H, N) and k_order (B, H, M), contiguous: the orders of queries and keys by their hashes in H rounds.
template <class T>
struct Hashing {
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0, n_hashes = 0;
    Rows<const T> q, k;
    const bool* mask = nullptr;  // (batch, M) or null; false puts a key behind all others
    const T* vectors = nullptr;  // (H, D + 2)
    T scale = 1;                 // of the queries
    int32_t *q_order = nullptr, *k_order = nullptr;
    int threads = 1;
};

// One level of Tangent attention. A clusters of the level above (heads, at first) have n candidates each, and f clusters of
// this level below them.
template <class T>
struct Level {
    int64_t n_above = 0, fan = 0, n_clusters = 0;  // A, f, clusters of a head
    int64_t n_candidates = 0, width = 0, value_width = 0, n_near = 0, n_far = 0;
    int64_t leaves_of_own = 0;            // leaves of a cluster whose own keys come first; 0: they do not
    const T* centroids = nullptr;         // (A, f, D)
    const T* spread = nullptr;            // (A, f)
    const T* vectors = nullptr;           // (rows, D + E), each key with its value behind it
    const int64_t* candidates = nullptr;  // (A, n), of these rows; null: n rows for each, one after the other
    const bool* hidden = nullptr;         // (rows,) or null
    const T *key_spread = nullptr, *weight = nullptr;  // (rows,)
    const int64_t* branch = nullptr;                   // (rows,)
    int64_t* kept = nullptr;                           // (A, f, n_near), places among the candidates, ascending
    T *far = nullptr, *bias = nullptr;                 // (A, f, n_far, D + E), (A, f, n_far)
    int threads = 1;
};

// The same functions, compiled for one instruction set.
struct Kernels {
    const char* name;
    void (*forward32)(const Call<float>&, const Forward<float>&);
    void (*forward64)(const Call<double>&, const Forward<double>&);
    void (*backward32)(const Call<float>&, const Backward<float>&);
    void (*backward64)(const Call<double>&, const Backward<double>&);
    void (*sort_by_hash32)(const Hashing<float>&);
    void (*sort_by_hash64)(const Hashing<double>&);
    void (*fold_level32)(const Level<float>&);
    void (*fold_level64)(const Level<double>&);
};

}  // namespace smyrf
