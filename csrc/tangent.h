// Tangent attention, forward and backward: the tree, near and far keys, and attention in one call.
#pragma once

#include <cstdint>
#include <memory>

#include "attend_backward.h"
#include "attend_forward.h"
#include "isa.h"
#include "params.h"
#include "selection.h"
#include "threads.h"
#include "tree.h"

namespace smyrf::SMYRF_ISA {

// The sizes that one stage shares with the whole call.
template <class Params>
void copy_sizes(const TangentParams& params, Params& to) {
    to.execution = params.execution;
    to.batch = params.batch, to.heads = params.heads, to.kv_heads = params.kv_heads;
    to.n_keys = params.n_keys, to.width = params.width, to.k = params.k;
}

// The far keys of each leaf: those of its cluster at each level, (L, ΣF).
class FarIndex {
   public:
    explicit FarIndex(const Span<LevelSizes>& levels) {
        const int64_t n_leaves = levels.back().n_clusters;
        for (const LevelSizes& level : levels) n_per_leaf_ += level.n_far;
        index_.reset(new int32_t[n_leaves * n_per_leaf_]);
        int64_t column = 0;
        for (const LevelSizes& level : levels) {
            for (int64_t leaf = 0; leaf < n_leaves; ++leaf)
                for (int64_t f = 0; f < level.n_far; ++f) {
                    const int64_t cluster = leaf / (n_leaves / level.n_clusters);
                    index_[leaf * n_per_leaf_ + column + f] = static_cast<int32_t>(n_rows_ + cluster * level.n_far + f);
                }
            column += level.n_far, n_rows_ += level.n_clusters * level.n_far;
        }
    }
    int64_t n_rows() const { return n_rows_; }
    int64_t n_per_leaf() const { return n_per_leaf_; }
    const int32_t* data() const { return index_.get(); }

   private:
    int64_t n_rows_ = 0, n_per_leaf_ = 0;
    std::unique_ptr<int32_t[]> index_;
};

// The leaves with their near and far keys, as a list of groups.
inline GroupList leaves_as_groups(const TangentParams& params, const FarIndex& index) {
    GroupList list;
    const int64_t n_leaves = params.levels.back().n_clusters;
    list.n_groups = n_leaves, list.n_query_slots = (params.n_queries + n_leaves - 1) / n_leaves;
    list.n_key_slots = params.levels.back().n_near;
    list.queries = params.queries, list.queries_row_stride = n_leaves * list.n_query_slots;
    list.keys = params.near, list.keys_row_stride = n_leaves * list.n_key_slots;
    list.far.n_rows = index.n_rows(), list.far.n_per_group = index.n_per_leaf(), list.far.index = index.data();
    list.far.keys = params.far_keys, list.far.values = params.far_values, list.far.bias = params.far_bias;
    return list;
}

inline AttendParams attend_params(const TangentParams& params, const GroupList& list) {
    AttendParams attend;
    copy_sizes(params, attend);
    attend.n_queries = params.n_queries, attend.value_width = params.value_width;
    attend.q = params.q, attend.v = params.v;
    attend.scale = params.scale, attend.dropout_p = params.dropout_p, attend.seed = params.seed;
    attend.lists = {&list, 1};
    return attend;
}

// The tables of all levels as parts, one row after the other.
struct LevelTables {
    Part far_keys, far_values, far_bias, centroids, kept;

    explicit LevelTables(const TangentParams& params) {
        int64_t n_far = 0, n_clusters = 0, n_kept = 0;
        for (const LevelSizes& level : params.levels) {
            n_far += level.n_clusters * level.n_far, n_kept += level.n_clusters * level.n_near;
            n_clusters += level.n_clusters;
        }
        far_keys = {params.far_keys, n_far * params.width};
        far_values = {params.far_values, n_far * params.value_width};
        far_bias = {params.far_bias, n_far};
        centroids = {params.centroids, n_clusters * params.width};
        kept = {params.kept, n_kept};
    }
};

template <class T>
void tangent_forward(const TangentParams& params, const AttendOutput& output) {
    const int64_t n_rows = params.batch * params.heads;
    if (n_rows == 0) return;
    const int64_t n_leaves = params.levels.back().n_clusters;
    const int64_t leaf_size = (params.n_queries + n_leaves - 1) / n_leaves, n_slots = n_rows * n_leaves * leaf_size;
    std::unique_ptr<bool[]> is_copy(new bool[n_slots]);
    std::unique_ptr<int32_t[]> leaf_of_key(new int32_t[n_rows * params.n_keys]);
    TreeParams tree;
    copy_sizes(params, tree);
    tree.n_queries = params.n_queries, tree.q = params.q, tree.key_mask = params.key_mask;
    tree.n_leaves = n_leaves, tree.rank = params.rank;
    tree.queries = params.queries, tree.is_copy = is_copy.get();
    tree.keys = params.order, tree.leaf_of_key = leaf_of_key.get();
    build_tree<T>(tree);

    SelectParams select;
    copy_sizes(params, select);
    select.n_queries = params.n_queries, select.value_width = params.value_width;
    select.q = params.q, select.v = params.v, select.scale = params.scale, select.key_mask = params.key_mask;
    select.n_leaves = n_leaves, select.leaf_size = leaf_size;
    select.queries = params.queries, select.order = params.order, select.leaf_of_key = leaf_of_key.get();
    select.levels = params.levels, select.near = params.near;
    const LevelTables tables(params);
    select.far_keys = tables.far_keys, select.far_values = tables.far_values, select.far_bias = tables.far_bias;
    select.centroids = tables.centroids, select.kept = tables.kept;
    select_and_fold<T>(select);

    for (int64_t i = 0; i < n_slots; ++i)
        if (is_copy[i]) params.queries[i] = -1;
    const FarIndex index(params.levels);
    const GroupList list = leaves_as_groups(params, index);
    attend_forward<T>(attend_params(params, list), output);
}

template <class T>
void tangent_backward(const TangentParams& params, const AttendGradients& gradients) {
    const int64_t n_rows = params.batch * params.heads;
    if (n_rows == 0) return;
    const FarIndex index(params.levels);
    const int64_t n_far = n_rows * index.n_rows();
    std::unique_ptr<T[]> d_keys(new T[n_far * params.width]()), d_values(new T[n_far * params.value_width]());
    std::unique_ptr<T[]> d_bias(new T[n_far]());
    GroupList list = leaves_as_groups(params, index);
    list.far.d_keys = d_keys.get(), list.far.d_values = d_values.get(), list.far.d_bias = d_bias.get();
    attend_backward<T>(attend_params(params, list), gradients);

    SelectGradients select;
    copy_sizes(params, select);
    select.value_width = params.value_width, select.v = params.v, select.key_mask = params.key_mask;
    select.order = params.order, select.levels = params.levels;
    const LevelTables tables(params);
    select.far_keys = tables.far_keys, select.far_values = tables.far_values, select.far_bias = tables.far_bias;
    select.centroids = tables.centroids, select.kept = tables.kept;
    select.d_far_keys = {d_keys.get(), tables.far_keys.row_stride};
    select.d_far_values = {d_values.get(), tables.far_values.row_stride};
    select.d_far_bias = {d_bias.get(), tables.far_bias.row_stride};
    select.dk = gradients.dk, select.dv = gradients.dv;
    select_and_fold_backward<T>(select);
}

}  // namespace smyrf::SMYRF_ISA
