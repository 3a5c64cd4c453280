// The Python module `smyrf._native`: kernels that take tensors.
//
// Sizes, strides and addresses are read from the tensors and checked here, in one place; nothing that Python passes is
// trusted. A tensor must not be resized by another thread during a call.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "params.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using smyrf::Arguments;
using smyrf::Dtype;
using smyrf::Tensor;
constexpr int64_t ANY = Tensor::ANY;

// Far keys and lists of groups, as Python builds them.
struct FarKeys {
    nb::object keys, values, bias, index, d_keys, d_values, d_bias;
};
struct GroupList {
    nb::object queries, keys;
    bool causal;
    nb::object multiplicity, far;
};

smyrf::Execution execution(const Tensor& x, int threads) {
    if (!x.is_floating_point()) x.expect(Dtype::float32, {});
    return {x.dtype() == Dtype::float64, threads};
}

// The shapes of q, k and v, and all that follows from them.
template <class Params>
void read_sizes(Params& params, const Tensor& q, const Tensor& k) {
    const Dtype dtype = q.dtype();
    q.expect(dtype, {ANY, ANY, ANY, ANY});
    params.batch = q.size(0), params.heads = q.size(1), params.n_queries = q.size(2), params.width = q.size(3);
    k.expect(dtype, {params.batch, ANY, ANY, params.width});
    params.kv_heads = k.size(1), params.n_keys = k.size(2);
    params.q = q.rows(), params.k = k.rows();
}

const bool* read_mask(Arguments& tensors, nb::handle key_mask, int64_t batch, int64_t n_keys) {
    if (key_mask.is_none()) return nullptr;
    return static_cast<const bool*>(
        tensors.input(key_mask, "key_mask").expect(Dtype::boolean, {batch, n_keys}).contiguous());
}

smyrf::FarKeys read_far(Arguments& tensors, const FarKeys& far, const smyrf::AttendParams& params, Dtype dtype,
                        int64_t n_groups, bool backward) {
    const int64_t n_rows = params.batch * params.heads;
    const Tensor &keys = tensors.input(far.keys, "far.keys"), &index = tensors.input(far.index, "far.index");
    keys.expect(dtype, {n_rows, ANY, params.width});
    index.expect(Dtype::int32, {n_groups, ANY});
    smyrf::FarKeys read;
    read.n_rows = keys.size(1), read.n_per_group = index.size(1);
    read.keys = keys.contiguous(), read.index = static_cast<int32_t*>(index.contiguous());
    const auto values_of = [&](const Tensor& x) {
        return x.expect(dtype, {n_rows, read.n_rows, params.value_width}).contiguous();
    };
    const auto bias_of = [&](const Tensor& x) { return x.expect(dtype, {n_rows, read.n_rows}).contiguous(); };
    read.values = values_of(tensors.input(far.values, "far.values"));
    read.bias = bias_of(tensors.input(far.bias, "far.bias"));
    if (!backward) return read;
    read.d_keys =
        tensors.output(far.d_keys, "far.d_keys").expect(dtype, {n_rows, read.n_rows, params.width}).contiguous();
    read.d_values = values_of(tensors.output(far.d_values, "far.d_values"));
    read.d_bias = bias_of(tensors.output(far.d_bias, "far.d_bias"));
    return read;
}

smyrf::GroupList read_list(Arguments& tensors, const GroupList& list, const smyrf::AttendParams& params, Dtype dtype,
                           bool backward) {
    const int64_t n_rows = params.batch * params.heads;
    const Tensor &queries = tensors.input(list.queries, "queries"), &keys = tensors.input(list.keys, "keys");
    queries.expect(Dtype::int32, {n_rows, ANY, ANY});
    keys.expect(Dtype::int32, {n_rows, queries.size(1), ANY});
    smyrf::GroupList read;
    read.n_groups = queries.size(1), read.n_query_slots = queries.size(2), read.n_key_slots = keys.size(2);
    read.queries = static_cast<int32_t*>(queries.contiguous_rows(read.queries_row_stride));
    read.keys = static_cast<int32_t*>(keys.contiguous_rows(read.keys_row_stride));
    read.causal = list.causal;
    if (!list.multiplicity.is_none())
        read.multiplicity = static_cast<int16_t*>(
            tensors.input(list.multiplicity, "multiplicity")
                .expect(Dtype::int16, {n_rows, read.n_groups, read.n_query_slots, read.n_key_slots})
                .contiguous());
    if (!list.far.is_none()) {
        FarKeys far;
        if (!nb::try_cast(list.far, far)) throw nb::type_error("far must be FarKeys or None");
        read.far = read_far(tensors, far, params, dtype, read.n_groups, backward);
    }
    return read;
}

// The parameters that both directions of `attend` share; `read` keeps the lists.
smyrf::AttendParams read_attend(Arguments& tensors, const Tensor& q, const Tensor& k, const Tensor& v,
                                const std::vector<GroupList>& lists, double scale, double dropout_p, int64_t seed,
                                int threads, bool backward, std::vector<smyrf::GroupList>& read) {
    smyrf::AttendParams params;
    params.execution = execution(q, threads);
    read_sizes(params, q, k);
    v.expect(q.dtype(), {params.batch, params.kv_heads, params.n_keys, ANY});
    params.value_width = v.size(3), params.v = v.rows();
    for (const GroupList& list : lists) read.push_back(read_list(tensors, list, params, q.dtype(), backward));
    params.lists = {read.data(), static_cast<int64_t>(read.size())};
    params.scale = scale, params.dropout_p = dropout_p, params.seed = seed;
    return params;
}

template <class Params>
smyrf::AttendOutput read_output(const Tensor& out, const Tensor& lse, Dtype dtype, const Params& params) {
    out.expect(dtype, {params.batch, params.heads, params.n_queries, params.value_width});
    lse.expect(dtype, {params.batch, params.heads, params.n_queries});
    return {out.contiguous(), lse.contiguous()};
}

// The gradients of `attend` and of Tangent attention.
template <class Params>
smyrf::AttendGradients read_gradients(Arguments& tensors, Dtype dtype, const Params& params, nb::handle out,
                                      nb::handle lse, nb::handle grad, nb::handle dq, nb::handle dk, nb::handle dv) {
    const auto gradient = [&](nb::handle x, const char* name, int64_t heads, int64_t length, int64_t width) {
        return tensors.output(x, name).expect(dtype, {params.batch, heads, length, width}).contiguous();
    };
    const smyrf::AttendOutput output = read_output(tensors.input(out, "out"), tensors.input(lse, "lse"), dtype, params);
    smyrf::AttendGradients gradients;
    gradients.grad = tensors.input(grad, "grad")
                         .expect(dtype, {params.batch, params.heads, params.n_queries, params.value_width})
                         .rows();
    gradients.out = output.out, gradients.lse = output.lse;
    gradients.dq = gradient(dq, "dq", params.heads, params.n_queries, params.width);
    gradients.dk = gradient(dk, "dk", params.kv_heads, params.n_keys, params.width);
    gradients.dv = gradient(dv, "dv", params.kv_heads, params.n_keys, params.value_width);
    return gradients;
}

void attend_forward(nb::handle q, nb::handle k, nb::handle v, const std::vector<GroupList>& lists, double scale,
                    double dropout_p, int64_t seed, nb::handle out, nb::handle lse, int threads,
                    const std::string& isa) {
    Arguments tensors;
    const Tensor& of_q = tensors.input(q, "q");
    std::vector<smyrf::GroupList> read;
    const smyrf::AttendParams params = read_attend(tensors, of_q, tensors.input(k, "k"), tensors.input(v, "v"), lists,
                                                   scale, dropout_p, seed, threads, false, read);
    const smyrf::AttendOutput output =
        read_output(tensors.output(out, "out"), tensors.output(lse, "lse"), of_q.dtype(), params);
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    check(params);
    smyrf::find(isa).attend_forward(params, output);
}

void attend_backward(nb::handle q, nb::handle k, nb::handle v, const std::vector<GroupList>& lists, double scale,
                     double dropout_p, int64_t seed, nb::handle out, nb::handle lse, nb::handle grad, nb::handle dq,
                     nb::handle dk, nb::handle dv, int threads, const std::string& isa) {
    Arguments tensors;
    const Tensor& of_q = tensors.input(q, "q");
    std::vector<smyrf::GroupList> read;
    const smyrf::AttendParams params = read_attend(tensors, of_q, tensors.input(k, "k"), tensors.input(v, "v"), lists,
                                                   scale, dropout_p, seed, threads, true, read);
    const smyrf::AttendGradients gradients = read_gradients(tensors, of_q.dtype(), params, out, lse, grad, dq, dk, dv);
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    check(params);
    smyrf::find(isa).attend_backward(params, gradients);
}

void sort_by_hash(nb::handle q, nb::handle k, nb::handle key_mask, nb::handle vectors, double scale, nb::handle q_order,
                  nb::handle k_order, int threads, const std::string& isa) {
    Arguments tensors;
    const Tensor &of_q = tensors.input(q, "q"), &of_vectors = tensors.input(vectors, "vectors");
    smyrf::HashParams params;
    params.execution = execution(of_q, threads);
    read_sizes(params, of_q, tensors.input(k, "k"));
    params.key_mask = read_mask(tensors, key_mask, params.batch, params.n_keys);
    params.vectors = of_vectors.expect(of_q.dtype(), {ANY, params.width + 2}).contiguous();
    params.n_hashes = of_vectors.size(0);
    params.scale = scale;
    const auto order = [&](nb::handle x, const char* name, int64_t length) {
        return static_cast<int32_t*>(tensors.output(x, name)
                                         .expect(Dtype::int32, {params.batch, params.heads, params.n_hashes, length})
                                         .contiguous());
    };
    params.q_order = order(q_order, "q_order", params.n_queries);
    params.k_order = order(k_order, "k_order", params.n_keys);
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    check(params);
    const smyrf::Kernels& kernels = smyrf::find(isa);
    if (params.q_order == nullptr && params.k_order == nullptr) return;  // any number of rows without elements
    kernels.sort_by_hash(params);
}

void build_tree(nb::handle q, nb::handle k, nb::handle key_mask, int64_t rank, nb::handle queries, nb::handle is_copy,
                nb::handle keys, nb::handle leaf_of_key, int threads, const std::string& isa) {
    Arguments tensors;
    const Tensor &of_q = tensors.input(q, "q"), &of_queries = tensors.output(queries, "queries");
    smyrf::TreeParams params;
    params.execution = execution(of_q, threads);
    read_sizes(params, of_q, tensors.input(k, "k"));
    params.key_mask = read_mask(tensors, key_mask, params.batch, params.n_keys);
    params.rank = rank;
    const int64_t n_rows = params.batch * params.heads;
    params.n_leaves = of_queries.expect(Dtype::int32, {n_rows, ANY, ANY}).size(1);
    check(params);
    const int64_t leaf_size = (params.n_queries + params.n_leaves - 1) / params.n_leaves;
    of_queries.expect(Dtype::int32, {n_rows, params.n_leaves, leaf_size});
    params.queries = static_cast<int32_t*>(of_queries.contiguous());
    const auto indices = [&](nb::handle x, const char* name) {
        return static_cast<int32_t*>(
            tensors.output(x, name).expect(Dtype::int32, {n_rows, params.n_keys}).contiguous());
    };
    params.is_copy = static_cast<bool*>(
        tensors.output(is_copy, "is_copy").expect(Dtype::boolean, {n_rows, params.n_leaves, leaf_size}).contiguous());
    params.keys = indices(keys, "keys"), params.leaf_of_key = indices(leaf_of_key, "leaf_of_key");
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    smyrf::find(isa).build_tree(params);
}

smyrf::Span<smyrf::LevelSizes> span(const std::vector<smyrf::LevelSizes>& levels) {
    return {levels.data(), static_cast<int64_t>(levels.size())};
}

// Sizes of levels, as (clusters, near keys, far keys).
std::vector<smyrf::LevelSizes> read_levels(const std::vector<std::vector<int64_t>>& levels) {
    std::vector<smyrf::LevelSizes> read;
    for (const std::vector<int64_t>& level : levels) {
        if (level.size() != 3) throw nb::value_error("a level must have three sizes");
        read.push_back({level[0], level[1], level[2]});
    }
    smyrf::check_sizes(span(read));
    return read;
}

// Numbers of a row in tensors of all levels.
struct LevelTotals {
    int64_t n_clusters = 0, n_near = 0, n_far = 0;

    explicit LevelTotals(const smyrf::Span<smyrf::LevelSizes>& levels) {
        for (const smyrf::LevelSizes& level : levels) {
            n_clusters += level.n_clusters;
            n_near += level.n_clusters * level.n_near, n_far += level.n_clusters * level.n_far;
        }
    }
};

smyrf::Part read_part(const Tensor& x, Dtype dtype, std::initializer_list<int64_t> shape) {
    smyrf::Part read;
    read.address = x.expect(dtype, shape).contiguous_rows(read.row_stride);
    return read;
}

void select_and_fold(nb::handle q, nb::handle k, nb::handle v, nb::handle key_mask, nb::handle queries,
                     nb::handle order, nb::handle leaf_of_key, double scale,
                     const std::vector<std::vector<int64_t>>& levels, nb::handle near, nb::handle far_keys,
                     nb::handle far_values, nb::handle far_bias, nb::handle centroids, nb::handle kept, int threads,
                     const std::string& isa) {
    Arguments tensors;
    const Tensor &of_q = tensors.input(q, "q"), &of_v = tensors.input(v, "v");
    const Tensor& of_queries = tensors.input(queries, "queries");
    const Dtype dtype = of_q.dtype();
    const std::vector<smyrf::LevelSizes> sizes = read_levels(levels);
    smyrf::SelectParams params;
    params.execution = execution(of_q, threads);
    read_sizes(params, of_q, tensors.input(k, "k"));
    of_v.expect(dtype, {params.batch, params.kv_heads, params.n_keys, ANY});
    params.value_width = of_v.size(3), params.v = of_v.rows();
    params.key_mask = read_mask(tensors, key_mask, params.batch, params.n_keys);
    params.scale = scale;
    const int64_t n_rows = params.batch * params.heads;
    const auto indices = [&](const Tensor& x, std::initializer_list<int64_t> shape) {
        return static_cast<int32_t*>(x.expect(Dtype::int32, shape).contiguous());
    };
    params.queries = indices(of_queries, {n_rows, ANY, ANY});
    params.n_leaves = of_queries.size(1), params.leaf_size = of_queries.size(2);
    params.order = indices(tensors.input(order, "order"), {n_rows, params.n_keys});
    params.leaf_of_key = indices(tensors.input(leaf_of_key, "leaf_of_key"), {n_rows, params.n_keys});
    params.levels = span(sizes);
    check(params);
    const LevelTotals totals(params.levels);
    params.near = indices(tensors.output(near, "near"), {n_rows, params.n_leaves, params.levels.back().n_near});
    const auto table = [&](nb::handle x, const char* name, Dtype of, std::initializer_list<int64_t> shape) {
        return read_part(tensors.output(x, name), of, shape);
    };
    params.far_keys = table(far_keys, "far_keys", dtype, {n_rows, totals.n_far, params.width});
    params.far_values = table(far_values, "far_values", dtype, {n_rows, totals.n_far, params.value_width});
    params.far_bias = table(far_bias, "far_bias", dtype, {n_rows, totals.n_far});
    params.centroids = table(centroids, "centroids", dtype, {n_rows, totals.n_clusters, params.width});
    params.kept = table(kept, "kept", Dtype::int32, {n_rows, totals.n_near});
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    smyrf::find(isa).select_and_fold(params);
}

void select_and_fold_backward(nb::handle k, nb::handle v, nb::handle key_mask, nb::handle order,
                              const std::vector<std::vector<int64_t>>& levels, nb::handle far_keys,
                              nb::handle far_values, nb::handle far_bias, nb::handle centroids, nb::handle kept,
                              nb::handle d_far_keys, nb::handle d_far_values, nb::handle d_far_bias, nb::handle dk,
                              nb::handle dv, int threads, const std::string& isa) {
    Arguments tensors;
    const Tensor &of_k = tensors.input(k, "k"), &of_v = tensors.input(v, "v");
    const Tensor& of_order = tensors.input(order, "order");
    const Dtype dtype = of_k.dtype();
    const std::vector<smyrf::LevelSizes> sizes = read_levels(levels);
    smyrf::SelectGradients params;
    params.execution = execution(of_k, threads);
    of_k.expect(dtype, {ANY, ANY, ANY, ANY});
    params.batch = of_k.size(0), params.kv_heads = of_k.size(1), params.n_keys = of_k.size(2);
    params.width = of_k.size(3);
    of_v.expect(dtype, {params.batch, params.kv_heads, params.n_keys, ANY});
    params.value_width = of_v.size(3);
    params.k = of_k.rows(), params.v = of_v.rows();
    params.key_mask = read_mask(tensors, key_mask, params.batch, params.n_keys);
    const int64_t n_rows = of_order.expect(Dtype::int32, {ANY, params.n_keys}).size(0);
    if (params.batch == 0 ? n_rows != 0 : n_rows % params.batch != 0)
        throw nb::value_error(
            ("order has " + std::to_string(n_rows) + " rows for a batch of " + std::to_string(params.batch)).c_str());
    params.heads = params.batch == 0 ? params.kv_heads : n_rows / params.batch;
    params.order = static_cast<int32_t*>(of_order.contiguous());
    params.levels = span(sizes);
    const LevelTotals totals(params.levels);
    const auto keys = [&](nb::handle x, const char* name) {
        return read_part(tensors.input(x, name), dtype, {n_rows, totals.n_far, params.width});
    };
    const auto values = [&](nb::handle x, const char* name) {
        return read_part(tensors.input(x, name), dtype, {n_rows, totals.n_far, params.value_width});
    };
    const auto biases = [&](nb::handle x, const char* name) {
        return read_part(tensors.input(x, name), dtype, {n_rows, totals.n_far});
    };
    params.far_keys = keys(far_keys, "far_keys"), params.d_far_keys = keys(d_far_keys, "d_far_keys");
    params.far_values = values(far_values, "far_values");
    params.d_far_values = values(d_far_values, "d_far_values");
    params.far_bias = biases(far_bias, "far_bias"), params.d_far_bias = biases(d_far_bias, "d_far_bias");
    params.centroids =
        read_part(tensors.input(centroids, "centroids"), dtype, {n_rows, totals.n_clusters, params.width});
    params.kept = read_part(tensors.input(kept, "kept"), Dtype::int32, {n_rows, totals.n_near});
    const auto gradient = [&](nb::handle x, const char* name, int64_t n) {
        return tensors.output(x, name).expect(dtype, {params.batch, params.kv_heads, params.n_keys, n}).contiguous();
    };
    params.dk = gradient(dk, "dk", params.width), params.dv = gradient(dv, "dv", params.value_width);
    check(params);
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    smyrf::find(isa).select_and_fold_backward(params);
}

// A call of Tangent attention, with the tensors that forward writes and backward reads.
smyrf::TangentParams read_tangent(Arguments& tensors, bool backward, const Tensor& q, const Tensor& k, const Tensor& v,
                                  nb::handle key_mask, double scale, double dropout_p, int64_t seed, int64_t rank,
                                  const std::vector<smyrf::LevelSizes>& sizes, nb::handle queries, nb::handle order,
                                  nb::handle near, nb::handle far_keys, nb::handle far_values, nb::handle far_bias,
                                  nb::handle centroids, nb::handle kept, int threads) {
    const Dtype dtype = q.dtype();
    smyrf::TangentParams params;
    params.execution = execution(q, threads);
    read_sizes(params, q, k);
    v.expect(dtype, {params.batch, params.kv_heads, params.n_keys, ANY});
    params.value_width = v.size(3), params.v = v.rows();
    params.key_mask = read_mask(tensors, key_mask, params.batch, params.n_keys);
    params.scale = scale, params.dropout_p = dropout_p, params.seed = seed, params.rank = rank;
    params.levels = span(sizes);
    check(params);
    const LevelTotals totals(params.levels);
    const smyrf::LevelSizes& last = params.levels.back();
    const int64_t n_rows = params.batch * params.heads;
    const int64_t leaf_size = (params.n_queries + last.n_clusters - 1) / last.n_clusters;
    const auto table = [&](nb::handle x, const char* name, Dtype of, std::initializer_list<int64_t> shape) {
        return (backward ? tensors.input(x, name) : tensors.output(x, name)).expect(of, shape).contiguous();
    };
    const auto indices = [&](nb::handle x, const char* name, std::initializer_list<int64_t> shape) {
        return static_cast<int32_t*>(table(x, name, Dtype::int32, shape));
    };
    params.queries = indices(queries, "queries", {n_rows, last.n_clusters, leaf_size});
    params.order = indices(order, "order", {n_rows, params.n_keys});
    params.near = indices(near, "near", {n_rows, last.n_clusters, last.n_near});
    params.far_keys = table(far_keys, "far_keys", dtype, {n_rows, totals.n_far, params.width});
    params.far_values = table(far_values, "far_values", dtype, {n_rows, totals.n_far, params.value_width});
    params.far_bias = table(far_bias, "far_bias", dtype, {n_rows, totals.n_far});
    params.centroids = table(centroids, "centroids", dtype, {n_rows, totals.n_clusters, params.width});
    params.kept = indices(kept, "kept", {n_rows, totals.n_near});
    return params;
}

void tangent_forward(nb::handle q, nb::handle k, nb::handle v, nb::handle key_mask, double scale, double dropout_p,
                     int64_t seed, int64_t rank, const std::vector<std::vector<int64_t>>& levels, nb::handle queries,
                     nb::handle order, nb::handle near, nb::handle far_keys, nb::handle far_values, nb::handle far_bias,
                     nb::handle centroids, nb::handle kept, nb::handle out, nb::handle lse, int threads,
                     const std::string& isa) {
    Arguments tensors;
    const Tensor& of_q = tensors.input(q, "q");
    const std::vector<smyrf::LevelSizes> sizes = read_levels(levels);
    const smyrf::TangentParams params =
        read_tangent(tensors, false, of_q, tensors.input(k, "k"), tensors.input(v, "v"), key_mask, scale, dropout_p,
                     seed, rank, sizes, queries, order, near, far_keys, far_values, far_bias, centroids, kept, threads);
    const smyrf::AttendOutput output =
        read_output(tensors.output(out, "out"), tensors.output(lse, "lse"), of_q.dtype(), params);
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    smyrf::find(isa).tangent_forward(params, output);
}

void tangent_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle key_mask, double scale, double dropout_p,
                      int64_t seed, int64_t rank, const std::vector<std::vector<int64_t>>& levels, nb::handle queries,
                      nb::handle order, nb::handle near, nb::handle far_keys, nb::handle far_values,
                      nb::handle far_bias, nb::handle centroids, nb::handle kept, nb::handle out, nb::handle lse,
                      nb::handle grad, nb::handle dq, nb::handle dk, nb::handle dv, int threads,
                      const std::string& isa) {
    Arguments tensors;
    const Tensor& of_q = tensors.input(q, "q");
    const std::vector<smyrf::LevelSizes> sizes = read_levels(levels);
    const smyrf::TangentParams params =
        read_tangent(tensors, true, of_q, tensors.input(k, "k"), tensors.input(v, "v"), key_mask, scale, dropout_p,
                     seed, rank, sizes, queries, order, near, far_keys, far_values, far_bias, centroids, kept, threads);
    const smyrf::AttendGradients gradients = read_gradients(tensors, of_q.dtype(), params, out, lse, grad, dq, dk, dv);
    tensors.check_outputs();
    const nb::gil_scoped_release released;
    check_saved(params);
    smyrf::find(isa).tangent_backward(params, gradients);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::class_<FarKeys>(m, "FarKeys")
        .def(
            "__init__",
            [](FarKeys* self, nb::object keys, nb::object values, nb::object bias, nb::object index, nb::object d_keys,
               nb::object d_values,
               nb::object d_bias) { new (self) FarKeys{keys, values, bias, index, d_keys, d_values, d_bias}; },
            nb::kw_only(), "keys"_a, "values"_a, "bias"_a, "index"_a, "d_keys"_a = nb::none(),
            "d_values"_a = nb::none(), "d_bias"_a = nb::none());
    nb::class_<GroupList>(m, "GroupList")
        .def(
            "__init__",
            [](GroupList* self, nb::object queries, nb::object keys, bool causal, nb::object multiplicity,
               nb::object far) { new (self) GroupList{queries, keys, causal, multiplicity, far}; },
            nb::kw_only(), "queries"_a, "keys"_a, "causal"_a, "multiplicity"_a = nb::none(), "far"_a = nb::none());
    m.def("attend_forward", &attend_forward, nb::kw_only(), "q"_a, "k"_a, "v"_a, "lists"_a, "scale"_a, "dropout_p"_a,
          "seed"_a, "out"_a, "lse"_a, "threads"_a, "isa"_a);
    m.def("attend_backward", &attend_backward, nb::kw_only(), "q"_a, "k"_a, "v"_a, "lists"_a, "scale"_a, "dropout_p"_a,
          "seed"_a, "out"_a, "lse"_a, "grad"_a, "dq"_a, "dk"_a, "dv"_a, "threads"_a, "isa"_a);
    m.def("sort_by_hash", &sort_by_hash, nb::kw_only(), "q"_a, "k"_a, "key_mask"_a.none(), "vectors"_a, "scale"_a,
          "q_order"_a, "k_order"_a, "threads"_a, "isa"_a);
    m.def("build_tree", &build_tree, nb::kw_only(), "q"_a, "k"_a, "key_mask"_a.none(), "rank"_a, "queries"_a,
          "is_copy"_a, "keys"_a, "leaf_of_key"_a, "threads"_a, "isa"_a);
    m.def("select_and_fold", &select_and_fold, nb::kw_only(), "q"_a, "k"_a, "v"_a, "key_mask"_a.none(), "queries"_a,
          "order"_a, "leaf_of_key"_a, "scale"_a, "levels"_a, "near"_a, "far_keys"_a, "far_values"_a, "far_bias"_a,
          "centroids"_a, "kept"_a, "threads"_a, "isa"_a);
    m.def("select_and_fold_backward", &select_and_fold_backward, nb::kw_only(), "k"_a, "v"_a, "key_mask"_a.none(),
          "order"_a, "levels"_a, "far_keys"_a, "far_values"_a, "far_bias"_a, "centroids"_a, "kept"_a, "d_far_keys"_a,
          "d_far_values"_a, "d_far_bias"_a, "dk"_a, "dv"_a, "threads"_a, "isa"_a);
    m.def("tangent_forward", &tangent_forward, nb::kw_only(), "q"_a, "k"_a, "v"_a, "key_mask"_a.none(), "scale"_a,
          "dropout_p"_a, "seed"_a, "rank"_a, "levels"_a, "queries"_a, "order"_a, "near"_a, "far_keys"_a, "far_values"_a,
          "far_bias"_a, "centroids"_a, "kept"_a, "out"_a, "lse"_a, "threads"_a, "isa"_a);
    m.def("tangent_backward", &tangent_backward, nb::kw_only(), "q"_a, "k"_a, "v"_a, "key_mask"_a.none(), "scale"_a,
          "dropout_p"_a, "seed"_a, "rank"_a, "levels"_a, "queries"_a, "order"_a, "near"_a, "far_keys"_a, "far_values"_a,
          "far_bias"_a, "centroids"_a, "kept"_a, "out"_a, "lse"_a, "grad"_a, "dq"_a, "dk"_a, "dv"_a, "threads"_a,
          "isa"_a);
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const smyrf::Kernels* one : smyrf::available()) names.push_back(one->name);
        return names;
    });
}
