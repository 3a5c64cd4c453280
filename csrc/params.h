// Parameters of the native kernels: sizes, strides and addresses. No framework is known here.
//
// Shapes: B rows (batch × heads), N queries, M keys, D width, E value width,
//         L groups, C query slots and S key slots per group, T far keys of a row, F far keys of a group.
//
// Floating-point tensors are float32 or float64, as `Execution` says, and contiguous unless there are strides for them.
// Strides are in elements. module.cpp fills these structs from tensors, checks.cpp checks them.
// Nothing here is compiled per instruction set: kernels only read these structs.
#pragma once

#include <cstdint>

namespace smyrf {

// How a kernel runs.
struct Execution {
    bool double_precision = false;
    int threads = 1;
};

// Elements that someone else owns. Nothing in these structs owns memory: a kernel that made one would instantiate its
// destructor for an instruction set, see isa.h.
template <class X>
struct Span {
    const X* first = nullptr;
    int64_t n = 0;

    const X* begin() const { return first; }
    const X* end() const { return first + n; }
    bool empty() const { return n == 0; }
    const X& back() const { return first[n - 1]; }
    const X& operator[](int64_t i) const { return first[i]; }
};

// A tensor (batch, heads, length, width) whose last axis is contiguous.
struct Rows {
    const void* address = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// Far keys: a table for each of the B rows, and the keys of each group in it. Groups may share a far key.
struct FarKeys {
    int64_t n_rows = 0, n_per_group = 0;                             // T, F
    const void *keys = nullptr, *values = nullptr;                   // (B, T, D), (B, T, E)
    const void* bias = nullptr;                                      // (B, T), added to the scores; -inf: no such key
    const int32_t* index = nullptr;                                  // (L, F), of the T; the same for all B rows
    void *d_keys = nullptr, *d_values = nullptr, *d_bias = nullptr;  // gradients, zero before `attend_backward`
};

// One list of groups. An index of -1 is an empty slot.
struct GroupList {
    int64_t n_groups = 0, n_query_slots = 0, n_key_slots = 0;  // L, C, S
    const int32_t* queries = nullptr;                          // (B, L, C)
    const int32_t* keys = nullptr;                             // (B, L, S)
    int64_t queries_row_stride = 0, keys_row_stride = 0;       // 0 if all B rows share them
    bool causal = false;                                       // query slot i sees the key slots j <= i
    const int16_t* multiplicity = nullptr;                     // (B, L, C, S), divides the weights; or null
    FarKeys far;
};

struct AttendParams {
    Execution execution;
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0, value_width = 0;
    Rows q, k, v;
    Span<GroupList> lists;
    double scale = 1;
    double dropout_p = 0;
    int64_t seed = 0;
};

struct AttendOutput {
    void *out = nullptr, *lse = nullptr;  // (B, N, E), (B, N)
};

struct AttendGradients {
    Rows grad;                                         // (batch, heads, N, E)
    const void *out = nullptr, *lse = nullptr;         // the results of `attend_forward`
    void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // (B, N, D), (batch · kv_heads, M, D), (…, M, E): zero before
};

// Orders of queries and keys by their hashes, in H rounds.
struct HashParams {
    Execution execution;
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0, n_hashes = 0;
    Rows q, k;
    const bool* key_mask = nullptr;                  // (batch, M) or null; keys with false come last
    const void* vectors = nullptr;                   // (H, D + 2)
    double scale = 1;                                // of the queries
    int32_t *q_order = nullptr, *k_order = nullptr;  // (B, H, N), (B, H, M), written
};

// The joint tree of queries and keys, with L leaves of C = ⌈N / L⌉ queries each.
struct TreeParams {
    Execution execution;
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0;
    Rows q, k;
    const bool* key_mask = nullptr;  // (batch, M) or null
    int64_t n_leaves = 1, rank = 1;  // L, a power of two; directions in which the tree sees queries and keys
    int32_t* queries = nullptr;      // (B, L · C), written: the queries of each leaf; copies fill up the last places
    bool* is_copy = nullptr;         // (B, L · C), written
    int32_t *keys = nullptr, *leaf_of_key = nullptr;  // (B, M), written: the order of the keys, and their leaves
};

// The keys that a level of Tangent attention looks at. A clusters of the level above (rows, at the first level) have n
// candidates each and f clusters of this level below them; L = A · f / B is the number of clusters of a row. A place is
// a position in the order of the tree.
struct CandidateKeys {
    int64_t batch = 0, heads = 0, kv_heads = 0, n_keys = 0, width = 0, value_width = 0;
    Rows k, v;
    const bool* key_mask = nullptr;       // (batch, M) or null
    const int32_t* order = nullptr;       // (B, M), the key at each place
    int64_t n_parents = 0, fan_out = 0;   // A, f
    int64_t n_candidates = 0;             // n
    const int32_t* candidates = nullptr;  // (A, n), places; null: all keys, n = M
    const void* centroids = nullptr;      // (A, f, D)
};

// A part of a tensor (B, …): the rest of each row is contiguous.
struct Part {
    void* address = nullptr;
    int64_t row_stride = 0;
};

// Near and far keys of a level: S near keys, F far keys of each cluster.
struct LevelParams {
    Execution execution;
    CandidateKeys keys;
    int64_t n_near = 0, n_far = 0;                              // S, F
    const int32_t* leaf_of_key = nullptr;                       // (B, M), by place
    const void *key_spread = nullptr, *value_weight = nullptr;  // (B, M), by place
    int64_t leaves_per_cluster = 0;                             // if a cluster's own keys come first, else 0
    const void* spread = nullptr;                               // (A, f)
    Part kept;                                                  // (B, L, S) int32, written: ascending candidates
    Part far_keys, far_values, far_bias;                        // (B, L·F, D), (B, L·F, E), (B, L·F), written
};

// Gradients of the keys and values that a level has folded.
struct LevelGradients {
    Execution execution;
    CandidateKeys keys;
    int64_t n_near = 0, n_far = 0;              // S, F
    Part kept;                                  // (B, L, S) int32
    Part far_keys, far_values, far_bias;        // the results of `fold_level`
    Part d_far_keys, d_far_values, d_far_bias;  // their gradients
    void *dk = nullptr, *dv = nullptr;          // (batch · kv_heads, M, D), (…, M, E): added to
};

// Sizes of a level: L clusters, S near keys and F far keys of each.
struct LevelSizes {
    int64_t n_clusters = 1, n_near = 1, n_far = 0;
};

// Near and far keys of all levels, from the tree. L leaves of C queries are the clusters of the last level.
struct SelectParams {
    Execution execution;
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0, value_width = 0;
    Rows q, k, v;
    double scale = 1;
    const bool* key_mask = nullptr;  // (batch, M) or null
    int64_t n_leaves = 1, leaf_size = 0;
    const int32_t* queries = nullptr;      // (B, L · C)
    const int32_t* order = nullptr;        // (B, M), the key at each place
    const int32_t* leaf_of_key = nullptr;  // (B, M), by place
    Span<LevelSizes> levels;
    // Written. Level by level, cluster by cluster:
    int32_t* near = nullptr;              // (B, L, S) of the last level: keys, -1 where masked
    Part far_keys, far_values, far_bias;  // (B, T, D), (B, T, E), (B, T)
    Part centroids;                       // (B, ΣL, D)
    Part kept;                            // (B, ΣL·S) int32: ascending candidates
};

// Gradients of k and v from those of far keys, their values and biases.
struct SelectGradients {
    Execution execution;
    int64_t batch = 0, heads = 0, kv_heads = 0, n_keys = 0, width = 0, value_width = 0;
    Rows k, v;
    const bool* key_mask = nullptr;
    const int32_t* order = nullptr;
    Span<LevelSizes> levels;
    Part far_keys, far_values, far_bias, centroids, kept;  // the results of `select_and_fold`
    Part d_far_keys, d_far_values, d_far_bias;
    void *dk = nullptr, *dv = nullptr;  // (batch · kv_heads, M, D), (…, M, E): zero before
};

// A whole call of Tangent attention. What it writes is all that its backward needs.
struct TangentParams {
    Execution execution;
    int64_t batch = 0, heads = 0, kv_heads = 0, n_queries = 0, n_keys = 0, width = 0, value_width = 0;
    Rows q, k, v;
    const bool* key_mask = nullptr;  // (batch, M) or null
    double scale = 1;
    double dropout_p = 0;
    int64_t seed = 0;
    int64_t rank = 1;
    Span<LevelSizes> levels;     // L leaves of C = ⌈N / L⌉ queries are the clusters of the last
    int32_t* queries = nullptr;  // (B, L, C), -1 for copies
    int32_t* order = nullptr;    // (B, M), the keys in the order of the tree
    int32_t* near = nullptr;     // (B, L, S)
    void *far_keys = nullptr, *far_values = nullptr, *far_bias = nullptr;  // (B, T, D), (B, T, E), (B, T)
    void* centroids = nullptr;                                             // (B, ΣL, D)
    int32_t* kept = nullptr;                                               // (B, ΣL·S)
};

}  // namespace smyrf
