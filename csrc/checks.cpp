#include "checks.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace smyrf {
namespace {

[[noreturn]] void refuse(const char* name, int64_t value, const std::string& rule) {
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + " " + rule);
}

void check_at_least(int64_t least, const char* name, int64_t value) {
    if (value < least) refuse(name, value, "must be at least " + std::to_string(least));
}

// Positions are int32.
void check_length(const char* name, int64_t value) {
    check_at_least(0, name, value);
    if (value > std::numeric_limits<int32_t>::max()) refuse(name, value, "must be below 2^31");
}

// Bounds the product of sizes: an expanded or an empty tensor can have any, and no offset may overflow.
void check_total(const char* name, std::initializer_list<int64_t> sizes) {
    constexpr double MOST = static_cast<double>(int64_t{1} << 40);
    double total = 1;
    for (const int64_t size : sizes) total *= static_cast<double>(std::max<int64_t>(size, 1));
    if (total > MOST) throw std::invalid_argument(std::string(name) + " must have at most 2^40 elements in all rows");
}

void check_width(const char* name, int64_t least, int64_t value) {
    constexpr int64_t MOST_WIDTH = 1 << 16;
    check_at_least(least, name, value);
    if (value > MOST_WIDTH) refuse(name, value, "must be at most " + std::to_string(MOST_WIDTH));
}

void check_execution(const Execution& execution) {
    constexpr int MOST_THREADS = 4096;
    check_at_least(1, "threads", execution.threads);
    if (execution.threads > MOST_THREADS)
        refuse("threads", execution.threads, "must be at most " + std::to_string(MOST_THREADS));
}

template <class Params>
void check_heads(const Params& params) {
    check_at_least(0, "batch", params.batch);
    check_at_least(0, "heads", params.heads);
    check_at_least(params.heads > 0 ? 1 : 0, "kv_heads", params.kv_heads);
    if (params.kv_heads > 0 && params.heads % params.kv_heads != 0)
        refuse("kv_heads", params.kv_heads, "must divide heads=" + std::to_string(params.heads));
    check_length("n_keys", params.n_keys);
    check_total("k", {params.batch, params.heads, params.n_keys});
    check_width("width", 1, params.width);
}

template <class Params>
void check_queries(const Params& params) {
    check_length("n_queries", params.n_queries);
    check_total("q", {params.batch, params.heads, params.n_queries});
}

// The indices of all rows must be in [least, length).
void check_indices(const char* name, const int32_t* indices, int64_t row_stride, int64_t n_rows, int64_t n,
                   int64_t least, int64_t length) {
    for (int64_t row = 0; row < (row_stride == 0 ? std::min<int64_t>(n_rows, 1) : n_rows); ++row) {
        const int32_t* at = indices + row * row_stride;
        int32_t low = std::numeric_limits<int32_t>::max(), high = -1;
        for (int64_t i = 0; i < n; ++i) low = std::min(low, at[i]), high = std::max(high, at[i]);
        if (n > 0 && (low < least || high >= length))
            throw std::out_of_range("the index " + std::to_string(high >= length ? high : low) + " of " + name +
                                    " is out of range: there are " + std::to_string(length));
    }
}

void check_list(const GroupList& list, const AttendParams& params) {
    constexpr int64_t EMPTY = std::numeric_limits<int32_t>::min();  // any negative index is an empty slot
    const int64_t n_rows = params.batch * params.heads;
    check_at_least(0, "n_groups", list.n_groups);
    check_at_least(0, "n_query_slots", list.n_query_slots);
    check_at_least(0, "n_key_slots", list.n_key_slots);
    check_total("queries", {n_rows, list.n_groups, list.n_query_slots});
    check_total("keys", {n_rows, list.n_groups, list.n_key_slots});
    check_indices("queries", list.queries, list.queries_row_stride, n_rows, list.n_groups * list.n_query_slots, EMPTY,
                  params.n_queries);
    check_indices("keys", list.keys, list.keys_row_stride, n_rows, list.n_groups * list.n_key_slots, EMPTY,
                  params.n_keys);
    const FarKeys& far = list.far;
    check_at_least(0, "n_per_group", far.n_per_group);
    check_length("n_rows", far.n_rows);
    check_total("far.keys", {n_rows, far.n_rows});
    check_total("far.index", {list.n_groups, far.n_per_group});
    if (list.causal && far.n_per_group > 0) throw std::invalid_argument("a causal list cannot have far keys");
    check_indices("far keys", far.index, 0, n_rows, list.n_groups * far.n_per_group, 0, far.n_rows);
}

// Each level has more clusters than the one above, and looks at the keys that it has kept.
template <class Params>
void check_levels(const Params& params) {
    check_heads(params);
    check_width("value_width", 0, params.value_width);
    if (params.levels.empty()) throw std::invalid_argument("there are no levels");
    int64_t n_above = 1, n_candidates = params.n_keys;
    for (const LevelSizes& level : params.levels) {
        check_at_least(1, "n_clusters", level.n_clusters);
        check_length("n_clusters", level.n_clusters);
        if (level.n_clusters % n_above != 0)
            refuse("n_clusters", level.n_clusters, "must be a multiple of " + std::to_string(n_above) + " above");
        check_at_least(1, "n_near", level.n_near);
        if (level.n_near > n_candidates)
            refuse("n_near", level.n_near, "must be at most " + std::to_string(n_candidates));
        check_at_least(0, "n_far", level.n_far);
        check_length("n_far", level.n_far);
        check_total("kept", {params.batch, params.heads, level.n_clusters, level.n_near});
        check_total("far_keys", {params.batch, params.heads, level.n_clusters, level.n_far});
        n_above = level.n_clusters, n_candidates = level.n_near;
    }
}

template <class Params>
void check_order(const Params& params) {
    const int64_t n_rows = params.batch * params.heads;
    check_indices("order", params.order, params.n_keys, n_rows, params.n_keys, 0, params.n_keys);
}

// What each level has kept of its candidates.
template <class Params>
void check_kept(const Params& params, const int32_t* kept, int64_t row_stride) {
    int64_t n_candidates = params.n_keys;
    for (const LevelSizes& level : params.levels) {
        const int64_t n = level.n_clusters * level.n_near;
        check_indices("kept", kept, row_stride, params.batch * params.heads, n, 0, n_candidates);
        kept += n, n_candidates = level.n_near;
    }
}

void check_dropout(double dropout_p) {
    if (!(dropout_p >= 0.0 && dropout_p <= 1.0)) throw std::invalid_argument("dropout_p must be in [0, 1]");
}

void check_tree(int64_t n_rows, int64_t n_leaves, int64_t rank) {
    check_at_least(1, "rank", rank);
    check_at_least(1, "n_leaves", n_leaves);
    if ((n_leaves & (n_leaves - 1)) != 0) refuse("n_leaves", n_leaves, "must be a power of two");
    check_length("n_leaves", n_leaves);
    check_total("queries", {n_rows, n_leaves});
}

}  // namespace

void check(const AttendParams& params) {
    check_execution(params.execution);
    check_heads(params);
    check_queries(params);
    check_width("value_width", 0, params.value_width);
    check_dropout(params.dropout_p);
    if (params.lists.empty()) throw std::invalid_argument("there is no list of groups");
    for (const GroupList& list : params.lists) check_list(list, params);
}

void check(const HashParams& params) {
    check_execution(params.execution);
    check_heads(params);
    check_queries(params);
    check_at_least(0, "n_hashes", params.n_hashes);
    check_total("q_order", {params.batch, params.heads, params.n_hashes, params.n_queries});
    check_total("k_order", {params.batch, params.heads, params.n_hashes, params.n_keys});
}

void check(const TreeParams& params) {
    check_execution(params.execution);
    check_heads(params);
    check_queries(params);
    check_tree(params.batch * params.heads, params.n_leaves, params.rank);
}

void check(const SelectParams& params) {
    check_execution(params.execution);
    check_levels(params);
    check_order(params);
    check_queries(params);
    check_at_least(1, "leaf_size", params.leaf_size);
    if (params.n_leaves != params.levels.back().n_clusters)
        refuse("n_leaves", params.n_leaves,
               "must be the number of clusters of the last level, " + std::to_string(params.levels.back().n_clusters));
    const int64_t n_rows = params.batch * params.heads, n_slots = params.n_leaves * params.leaf_size;
    check_indices("queries", params.queries, n_slots, n_rows, n_slots, 0, params.n_queries);
}

void check(const SelectGradients& params) {
    check_execution(params.execution);
    check_levels(params);
    check_order(params);
    check_kept(params, static_cast<const int32_t*>(params.kept.address), params.kept.row_stride);
}

void check(const TangentParams& params) {
    check_execution(params.execution);
    check_levels(params);
    check_queries(params);
    check_at_least(1, "n_queries", params.n_queries);
    check_tree(params.batch * params.heads, params.levels.back().n_clusters, params.rank);
    check_dropout(params.dropout_p);
}

void check_sizes(const Span<LevelSizes>& levels) {
    constexpr int64_t MOST_LEVELS = 32;  // n_clusters is below 2^31
    if (levels.n > MOST_LEVELS) refuse("levels", levels.n, "must be at most " + std::to_string(MOST_LEVELS));
    for (const LevelSizes& level : levels) {
        check_total("kept", {level.n_clusters, level.n_near});
        check_total("far_keys", {level.n_clusters, level.n_far});
    }
}

void check_saved(const TangentParams& params) {
    constexpr int64_t EMPTY = -1;
    const int64_t n_rows = params.batch * params.heads, n_leaves = params.levels.back().n_clusters;
    const int64_t n_slots = n_leaves * ((params.n_queries + n_leaves - 1) / n_leaves);
    const int64_t n_near = n_leaves * params.levels.back().n_near;
    int64_t n_kept = 0;
    for (const LevelSizes& level : params.levels) n_kept += level.n_clusters * level.n_near;
    check_indices("queries", params.queries, n_slots, n_rows, n_slots, EMPTY, params.n_queries);
    check_indices("near", params.near, n_near, n_rows, n_near, EMPTY, params.n_keys);
    check_order(params);
    check_kept(params, params.kept, n_kept);
}

}  // namespace smyrf
