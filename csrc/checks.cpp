#include "checks.h"

#include <algorithm>
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
    check_indices("queries", list.queries, list.queries_row_stride, n_rows, list.n_groups * list.n_query_slots, EMPTY,
                  params.n_queries);
    check_indices("keys", list.keys, list.keys_row_stride, n_rows, list.n_groups * list.n_key_slots, EMPTY,
                  params.n_keys);
    const FarKeys& far = list.far;
    check_at_least(0, "n_per_group", far.n_per_group);
    check_length("n_rows", far.n_rows);
    if (list.causal && far.n_per_group > 0) throw std::invalid_argument("a causal list cannot have far keys");
    check_indices("far keys", far.index, 0, n_rows, list.n_groups * far.n_per_group, 0, far.n_rows);
}

void check_candidates(const CandidateKeys& keys, int64_t n_near, int64_t n_far) {
    check_heads(keys);
    check_length("n_keys", keys.n_keys);
    check_at_least(1, "width", keys.width);
    check_at_least(0, "value_width", keys.value_width);
    check_at_least(0, "n_parents", keys.n_parents);
    check_at_least(1, "fan_out", keys.fan_out);
    check_at_least(1, "n_near", n_near);
    check_at_least(n_near, "n_candidates", keys.n_candidates);
    check_at_least(keys.n_candidates, "n_keys", keys.n_keys);
    check_at_least(0, "n_far", n_far);
    const int64_t n_rows = keys.batch * keys.heads;
    if (n_rows == 0 ? keys.n_parents != 0 : keys.n_parents % n_rows != 0)
        refuse("n_parents", keys.n_parents, "must be a multiple of batch · heads=" + std::to_string(n_rows));
    if (keys.candidates == nullptr && keys.n_candidates != keys.n_keys)
        refuse("n_candidates", keys.n_candidates, "without candidates must be n_keys=" + std::to_string(keys.n_keys));
    check_indices("order", keys.order, keys.n_keys, n_rows, keys.n_keys, 0, keys.n_keys);
    if (keys.candidates != nullptr)
        check_indices("candidates", keys.candidates, keys.n_candidates, keys.n_parents, keys.n_candidates, 0,
                      keys.n_keys);
}

}  // namespace

void check(const AttendParams& params) {
    check_execution(params.execution);
    check_heads(params);
    check_length("n_queries", params.n_queries);
    check_length("n_keys", params.n_keys);
    check_at_least(1, "width", params.width);
    check_at_least(0, "value_width", params.value_width);
    if (!(params.dropout_p >= 0.0 && params.dropout_p <= 1.0))
        throw std::invalid_argument("dropout_p must be in [0, 1]");
    if (params.lists.empty()) throw std::invalid_argument("there is no list of groups");
    for (const GroupList& list : params.lists) check_list(list, params);
}

void check(const HashParams& params) {
    check_execution(params.execution);
    check_heads(params);
    check_length("n_queries", params.n_queries);
    check_length("n_keys", params.n_keys);
    check_at_least(1, "width", params.width);
    check_at_least(0, "n_hashes", params.n_hashes);
}

void check(const TreeParams& params) {
    check_execution(params.execution);
    check_heads(params);
    check_length("n_queries", params.n_queries);
    check_length("n_keys", params.n_keys);
    check_at_least(1, "n_queries", params.n_queries);
    check_at_least(1, "n_keys", params.n_keys);
    check_at_least(1, "width", params.width);
    check_at_least(1, "rank", params.rank);
    check_at_least(1, "n_leaves", params.n_leaves);
    if ((params.n_leaves & (params.n_leaves - 1)) != 0) refuse("n_leaves", params.n_leaves, "must be a power of two");
    check_length("n_leaves", params.n_leaves);
}

void check(const LevelParams& params) {
    check_execution(params.execution);
    check_candidates(params.keys, params.n_near, params.n_far);
    check_at_least(0, "leaves_per_cluster", params.leaves_per_cluster);
}

void check(const LevelGradients& params) {
    check_execution(params.execution);
    check_candidates(params.keys, params.n_near, params.n_far);
}

}  // namespace smyrf
