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

smyrf::Execution execution(const Tensor& x, int threads, const std::string& isa) {
    if (!x.is_floating_point()) x.expect(Dtype::float32, {});
    return {x.dtype() == Dtype::float64, threads, isa};
}

const smyrf::Kernels& kernels(const smyrf::Execution& execution) { return smyrf::find(execution.isa); }

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

const bool* read_mask(nb::handle key_mask, int64_t batch, int64_t n_keys) {
    if (key_mask.is_none()) return nullptr;
    return static_cast<const bool*>(Tensor(key_mask, "key_mask").expect(Dtype::boolean, {batch, n_keys}).contiguous());
}

smyrf::FarKeys read_far(const FarKeys& far, const smyrf::AttendParams& params, Dtype dtype, int64_t n_groups,
                        bool backward) {
    const int64_t n_rows = params.batch * params.heads;
    const Tensor keys(far.keys, "far.keys"), index(far.index, "far.index");
    keys.expect(dtype, {n_rows, ANY, params.width});
    index.expect(Dtype::int32, {n_groups, ANY});
    smyrf::FarKeys read;
    read.n_rows = keys.size(1), read.n_per_group = index.size(1);
    read.keys = keys.contiguous(), read.index = static_cast<int32_t*>(index.contiguous());
    const auto values_of = [&](const nb::object& x, const char* name) {
        return Tensor(x, name).expect(dtype, {n_rows, read.n_rows, params.value_width}).contiguous();
    };
    const auto bias_of = [&](const nb::object& x, const char* name) {
        return Tensor(x, name).expect(dtype, {n_rows, read.n_rows}).contiguous();
    };
    read.values = values_of(far.values, "far.values"), read.bias = bias_of(far.bias, "far.bias");
    if (!backward) return read;
    read.d_keys = Tensor(far.d_keys, "far.d_keys").expect(dtype, {n_rows, read.n_rows, params.width}).contiguous();
    read.d_values = values_of(far.d_values, "far.d_values"), read.d_bias = bias_of(far.d_bias, "far.d_bias");
    return read;
}

smyrf::GroupList read_list(const GroupList& list, const smyrf::AttendParams& params, Dtype dtype, bool backward) {
    const int64_t n_rows = params.batch * params.heads;
    const Tensor queries(list.queries, "queries"), keys(list.keys, "keys");
    queries.expect(Dtype::int32, {n_rows, ANY, ANY});
    keys.expect(Dtype::int32, {n_rows, queries.size(1), ANY});
    smyrf::GroupList read;
    read.n_groups = queries.size(1), read.n_query_slots = queries.size(2), read.n_key_slots = keys.size(2);
    read.queries = static_cast<int32_t*>(queries.contiguous_rows(read.queries_row_stride));
    read.keys = static_cast<int32_t*>(keys.contiguous_rows(read.keys_row_stride));
    read.causal = list.causal;
    if (!list.multiplicity.is_none())
        read.multiplicity = static_cast<int16_t*>(
            Tensor(list.multiplicity, "multiplicity")
                .expect(Dtype::int16, {n_rows, read.n_groups, read.n_query_slots, read.n_key_slots})
                .contiguous());
    if (!list.far.is_none()) {
        FarKeys far;
        if (!nb::try_cast(list.far, far)) throw nb::type_error("far must be FarKeys or None");
        read.far = read_far(far, params, dtype, read.n_groups, backward);
    }
    return read;
}

// The parameters that both directions of `attend` share.
smyrf::AttendParams read_attend(const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<GroupList>& lists,
                                double scale, double dropout_p, int64_t seed, int threads, const std::string& isa,
                                bool backward) {
    smyrf::AttendParams params;
    params.execution = execution(q, threads, isa);
    read_sizes(params, q, k);
    v.expect(q.dtype(), {params.batch, params.kv_heads, params.n_keys, ANY});
    params.value_width = v.size(3), params.v = v.rows();
    for (const GroupList& list : lists) params.lists.push_back(read_list(list, params, q.dtype(), backward));
    params.scale = scale, params.dropout_p = dropout_p, params.seed = seed;
    return params;
}

void attend_forward(nb::handle q, nb::handle k, nb::handle v, const std::vector<GroupList>& lists, double scale,
                    double dropout_p, int64_t seed, nb::handle out, nb::handle lse, int threads,
                    const std::string& isa) {
    const Tensor of_q(q, "q"), of_out(out, "out"), of_lse(lse, "lse");
    const smyrf::AttendParams params =
        read_attend(of_q, Tensor(k, "k"), Tensor(v, "v"), lists, scale, dropout_p, seed, threads, isa, false);
    of_out.expect(of_q.dtype(), {params.batch, params.heads, params.n_queries, params.value_width});
    of_lse.expect(of_q.dtype(), {params.batch, params.heads, params.n_queries});
    const smyrf::AttendOutput output{of_out.contiguous(), of_lse.contiguous()};
    const nb::gil_scoped_release released;
    check(params);
    kernels(params.execution).attend_forward(params, output);
}

void attend_backward(nb::handle q, nb::handle k, nb::handle v, const std::vector<GroupList>& lists, double scale,
                     double dropout_p, int64_t seed, nb::handle out, nb::handle lse, nb::handle grad, nb::handle dq,
                     nb::handle dk, nb::handle dv, int threads, const std::string& isa) {
    const Tensor of_q(q, "q"), of_grad(grad, "grad");
    const Dtype dtype = of_q.dtype();
    const smyrf::AttendParams params =
        read_attend(of_q, Tensor(k, "k"), Tensor(v, "v"), lists, scale, dropout_p, seed, threads, isa, true);
    const auto shaped = [&](nb::handle x, const char* name, int64_t heads, int64_t length, int64_t width) {
        return Tensor(x, name).expect(dtype, {params.batch, heads, length, width}).contiguous();
    };
    smyrf::AttendGradients gradients;
    gradients.grad = of_grad.expect(dtype, {params.batch, params.heads, params.n_queries, params.value_width}).rows();
    gradients.out = shaped(out, "out", params.heads, params.n_queries, params.value_width);
    gradients.lse = Tensor(lse, "lse").expect(dtype, {params.batch, params.heads, params.n_queries}).contiguous();
    gradients.dq = shaped(dq, "dq", params.heads, params.n_queries, params.width);
    gradients.dk = shaped(dk, "dk", params.kv_heads, params.n_keys, params.width);
    gradients.dv = shaped(dv, "dv", params.kv_heads, params.n_keys, params.value_width);
    const nb::gil_scoped_release released;
    check(params);
    kernels(params.execution).attend_backward(params, gradients);
}

void sort_by_hash(nb::handle q, nb::handle k, nb::handle key_mask, nb::handle vectors, double scale, nb::handle q_order,
                  nb::handle k_order, int threads, const std::string& isa) {
    const Tensor of_q(q, "q"), of_vectors(vectors, "vectors");
    smyrf::HashParams params;
    params.execution = execution(of_q, threads, isa);
    read_sizes(params, of_q, Tensor(k, "k"));
    params.key_mask = read_mask(key_mask, params.batch, params.n_keys);
    params.vectors = of_vectors.expect(of_q.dtype(), {ANY, params.width + 2}).contiguous();
    params.n_hashes = of_vectors.size(0);
    params.scale = scale;
    const auto order = [&](nb::handle x, const char* name, int64_t length) {
        const Tensor tensor(x, name);
        tensor.expect(Dtype::int32, {params.batch, params.heads, params.n_hashes, length});
        return static_cast<int32_t*>(tensor.contiguous());
    };
    params.q_order = order(q_order, "q_order", params.n_queries);
    params.k_order = order(k_order, "k_order", params.n_keys);
    const nb::gil_scoped_release released;
    check(params);
    kernels(params.execution).sort_by_hash(params);
}

void build_tree(nb::handle q, nb::handle k, nb::handle key_mask, int64_t rank, nb::handle queries, nb::handle is_copy,
                nb::handle keys, nb::handle leaf_of_key, int threads, const std::string& isa) {
    const Tensor of_q(q, "q"), of_queries(queries, "queries");
    smyrf::TreeParams params;
    params.execution = execution(of_q, threads, isa);
    read_sizes(params, of_q, Tensor(k, "k"));
    params.key_mask = read_mask(key_mask, params.batch, params.n_keys);
    params.rank = rank;
    const int64_t n_rows = params.batch * params.heads;
    params.n_leaves = of_queries.expect(Dtype::int32, {n_rows, ANY, ANY}).size(1);
    check(params);
    const int64_t leaf_size = (params.n_queries + params.n_leaves - 1) / params.n_leaves;
    of_queries.expect(Dtype::int32, {n_rows, params.n_leaves, leaf_size});
    params.queries = static_cast<int32_t*>(of_queries.contiguous());
    const Tensor of_copies(is_copy, "is_copy"), of_keys(keys, "keys"), of_leaves(leaf_of_key, "leaf_of_key");
    params.is_copy =
        static_cast<bool*>(of_copies.expect(Dtype::boolean, {n_rows, params.n_leaves, leaf_size}).contiguous());
    params.keys = static_cast<int32_t*>(of_keys.expect(Dtype::int32, {n_rows, params.n_keys}).contiguous());
    params.leaf_of_key = static_cast<int32_t*>(of_leaves.expect(Dtype::int32, {n_rows, params.n_keys}).contiguous());
    const nb::gil_scoped_release released;
    kernels(params.execution).build_tree(params);
}

smyrf::CandidateKeys read_candidates(const Tensor& k, const Tensor& v, nb::handle key_mask, nb::handle order,
                                     nb::handle candidates, nb::handle centroids) {
    const Tensor of_order(order, "order"), of_centroids(centroids, "centroids");
    const Dtype dtype = k.dtype();
    smyrf::CandidateKeys keys;
    k.expect(dtype, {ANY, ANY, ANY, ANY});
    keys.batch = k.size(0), keys.kv_heads = k.size(1), keys.n_keys = k.size(2), keys.width = k.size(3);
    v.expect(dtype, {keys.batch, keys.kv_heads, keys.n_keys, ANY});
    keys.value_width = v.size(3);
    keys.k = k.rows(), keys.v = v.rows();
    keys.key_mask = read_mask(key_mask, keys.batch, keys.n_keys);
    const int64_t n_rows = of_order.expect(Dtype::int32, {ANY, keys.n_keys}).size(0);
    if (keys.batch == 0 || n_rows % keys.batch != 0)
        throw nb::value_error(
            ("order has " + std::to_string(n_rows) + " rows for a batch of " + std::to_string(keys.batch)).c_str());
    keys.heads = n_rows / keys.batch;
    keys.order = static_cast<int32_t*>(of_order.contiguous());
    keys.centroids = of_centroids.expect(dtype, {ANY, ANY, keys.width}).contiguous();
    keys.n_parents = of_centroids.size(0), keys.fan_out = of_centroids.size(1);
    keys.n_candidates = keys.n_keys;
    if (!candidates.is_none()) {
        const Tensor places(candidates, "candidates");
        keys.candidates = static_cast<int32_t*>(places.expect(Dtype::int32, {keys.n_parents, ANY}).contiguous());
        keys.n_candidates = places.size(1);
    }
    return keys;
}

// A part of a tensor of all clusters: n numbers of each.
smyrf::Part read_part(nb::handle x, const char* name, Dtype dtype, const smyrf::CandidateKeys& keys, int64_t n) {
    const int64_t n_rows = keys.batch * keys.heads,
                  n_clusters = n_rows == 0 ? 0 : keys.n_parents * keys.fan_out / n_rows;
    smyrf::Part read;
    read.address = Tensor(x, name).expect(dtype, {n_rows, n_clusters * n}).contiguous_rows(read.row_stride);
    return read;
}

void fold_level(nb::handle k, nb::handle v, nb::handle key_mask, nb::handle order, nb::handle leaf_of_key,
                nb::handle key_spread, nb::handle value_weight, nb::handle candidates, nb::handle centroids,
                nb::handle spread, int64_t n_near, int64_t n_far, int64_t leaves_per_cluster, nb::handle kept,
                nb::handle far_keys, nb::handle far_values, nb::handle far_bias, int threads, const std::string& isa) {
    const Tensor of_k(k, "k");
    const Dtype dtype = of_k.dtype();
    smyrf::LevelParams params;
    params.execution = execution(of_k, threads, isa);
    params.keys = read_candidates(of_k, Tensor(v, "v"), key_mask, order, candidates, centroids);
    const smyrf::CandidateKeys& keys = params.keys;
    const auto by_place = [&](nb::handle x, const char* name, Dtype of) {
        return Tensor(x, name).expect(of, {keys.batch * keys.heads, keys.n_keys}).contiguous();
    };
    params.leaf_of_key = static_cast<int32_t*>(by_place(leaf_of_key, "leaf_of_key", Dtype::int32));
    params.key_spread = by_place(key_spread, "key_spread", dtype);
    params.value_weight = by_place(value_weight, "value_weight", dtype);
    params.spread = Tensor(spread, "spread").expect(dtype, {keys.n_parents, keys.fan_out}).contiguous();
    params.n_near = n_near, params.n_far = n_far, params.leaves_per_cluster = leaves_per_cluster;
    check(params);
    params.kept = read_part(kept, "kept", Dtype::int32, keys, n_near);
    params.far_keys = read_part(far_keys, "far_keys", dtype, keys, n_far * keys.width);
    params.far_values = read_part(far_values, "far_values", dtype, keys, n_far * keys.value_width);
    params.far_bias = read_part(far_bias, "far_bias", dtype, keys, n_far);
    const nb::gil_scoped_release released;
    kernels(params.execution).fold_level(params);
}

void fold_level_backward(nb::handle k, nb::handle v, nb::handle key_mask, nb::handle order, nb::handle candidates,
                         nb::handle centroids, int64_t n_near, int64_t n_far, nb::handle kept, nb::handle far_keys,
                         nb::handle far_values, nb::handle far_bias, nb::handle d_far_keys, nb::handle d_far_values,
                         nb::handle d_far_bias, nb::handle dk, nb::handle dv, int threads, const std::string& isa) {
    const Tensor of_k(k, "k");
    const Dtype dtype = of_k.dtype();
    smyrf::LevelGradients params;
    params.execution = execution(of_k, threads, isa);
    params.keys = read_candidates(of_k, Tensor(v, "v"), key_mask, order, candidates, centroids);
    const smyrf::CandidateKeys& keys = params.keys;
    params.n_near = n_near, params.n_far = n_far;
    check(params);
    params.kept = read_part(kept, "kept", Dtype::int32, keys, n_near);
    const int64_t width = n_far * keys.width, value_width = n_far * keys.value_width;
    params.far_keys = read_part(far_keys, "far_keys", dtype, keys, width);
    params.far_values = read_part(far_values, "far_values", dtype, keys, value_width);
    params.far_bias = read_part(far_bias, "far_bias", dtype, keys, n_far);
    params.d_far_keys = read_part(d_far_keys, "d_far_keys", dtype, keys, width);
    params.d_far_values = read_part(d_far_values, "d_far_values", dtype, keys, value_width);
    params.d_far_bias = read_part(d_far_bias, "d_far_bias", dtype, keys, n_far);
    const auto gradient = [&](nb::handle x, const char* name, int64_t n) {
        return Tensor(x, name).expect(dtype, {keys.batch, keys.kv_heads, keys.n_keys, n}).contiguous();
    };
    params.dk = gradient(dk, "dk", keys.width), params.dv = gradient(dv, "dv", keys.value_width);
    const nb::gil_scoped_release released;
    kernels(params.execution).fold_level_backward(params);
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
    m.def("fold_level", &fold_level, nb::kw_only(), "k"_a, "v"_a, "key_mask"_a.none(), "order"_a, "leaf_of_key"_a,
          "key_spread"_a, "value_weight"_a, "candidates"_a.none(), "centroids"_a, "spread"_a, "n_near"_a, "n_far"_a,
          "leaves_per_cluster"_a, "kept"_a, "far_keys"_a, "far_values"_a, "far_bias"_a, "threads"_a, "isa"_a);
    m.def("fold_level_backward", &fold_level_backward, nb::kw_only(), "k"_a, "v"_a, "key_mask"_a.none(), "order"_a,
          "candidates"_a.none(), "centroids"_a, "n_near"_a, "n_far"_a, "kept"_a, "far_keys"_a, "far_values"_a,
          "far_bias"_a, "d_far_keys"_a, "d_far_values"_a, "d_far_bias"_a, "dk"_a, "dv"_a, "threads"_a, "isa"_a);
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const smyrf::Kernels* one : smyrf::available()) names.push_back(one->name);
        return names;
    });
}
