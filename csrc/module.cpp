// The Python module `smyrf._native`: addresses and sizes in, nothing out. Its callers (`smyrf/extension.py` says how) keep
// the tensors alive and have checked their shapes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "dispatch.h"

namespace nb = nanobind;
using Ints = std::vector<int64_t>;

namespace {

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Address, then strides of batch, head and row.
template <class T>
smyrf::Rows<T> rows(const Ints& numbers) {
    return {at<T>(numbers.at(0)), numbers.at(1), numbers.at(2), numbers.at(3)};
}

template <class T>
smyrf::Call<T> call(const Ints& sizes, const Ints& q, const Ints& k, const Ints& v, const std::vector<Ints>& lists,
                    double scale, double dropout_p, int64_t seed, int threads) {
    smyrf::Call<T> found;
    found.batch = sizes.at(0), found.heads = sizes.at(1), found.kv_heads = sizes.at(2);
    found.n_queries = sizes.at(3), found.n_keys = sizes.at(4), found.width = sizes.at(5), found.value_width = sizes.at(6);
    found.q = rows<const T>(q), found.k = rows<const T>(k), found.v = rows<const T>(v);
    for (const Ints& one : lists) {
        smyrf::List<T> list;
        list.n_groups = one.at(0), list.slots = one.at(1), list.size = one.at(2), list.n_extra = one.at(3);
        list.queries = at<const int32_t>(one.at(4)), list.queries_stride = one.at(5);
        list.keys = at<const int32_t>(one.at(6)), list.keys_stride = one.at(7);
        list.causal = one.at(8) != 0, list.repeats = at<const int16_t>(one.at(9));
        list.extra_keys = at<const T>(one.at(10)), list.extra_values = at<const T>(one.at(11));
        list.extra_bias = at<const T>(one.at(12)), list.d_extra_keys = at<T>(one.at(13));
        list.d_extra_values = at<T>(one.at(14)), list.d_extra_bias = at<T>(one.at(15));
        found.lists.push_back(list);
    }
    found.scale = static_cast<T>(scale), found.seed = seed, found.threads = threads;
    found.dropout = dropout_p > 0.0;
    found.threshold = dropout_p < 1.0 ? static_cast<uint32_t>(dropout_p * 4294967296.0) : 0;
    found.grow = dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - dropout_p)) : T(0);  // float in every kernel
    return found;
}

const smyrf::Kernels& kernels(const std::string& isa) {
    const smyrf::Kernels* found = isa.empty() ? smyrf::available().back() : smyrf::find(isa.c_str());
    if (found == nullptr) throw std::invalid_argument("isa='" + isa + "' cannot be run on this machine");
    return *found;
}

void forward(bool wide, const Ints& sizes, const Ints& q, const Ints& k, const Ints& v, const std::vector<Ints>& lists,
             double scale, double dropout_p, int64_t seed, int64_t out, int64_t lse, int threads,
             const std::string& isa) {
    const smyrf::Kernels& use = kernels(isa);
    if (wide)
        use.forward64(call<double>(sizes, q, k, v, lists, scale, dropout_p, seed, threads), {at<double>(out), at<double>(lse)});
    else
        use.forward32(call<float>(sizes, q, k, v, lists, scale, dropout_p, seed, threads), {at<float>(out), at<float>(lse)});
}

void backward(bool wide, const Ints& sizes, const Ints& q, const Ints& k, const Ints& v, const std::vector<Ints>& lists,
              double scale, double dropout_p, int64_t seed, const Ints& grad, int64_t out, int64_t lse, int64_t dq,
              int64_t dk, int64_t dv, int threads, const std::string& isa) {
    const smyrf::Kernels& use = kernels(isa);
    if (wide)
        use.backward64(call<double>(sizes, q, k, v, lists, scale, dropout_p, seed, threads),
                       {rows<const double>(grad), at<const double>(out), at<const double>(lse), at<double>(dq),
                        at<double>(dk), at<double>(dv)});
    else
        use.backward32(call<float>(sizes, q, k, v, lists, scale, dropout_p, seed, threads),
                       {rows<const float>(grad), at<const float>(out), at<const float>(lse), at<float>(dq),
                        at<float>(dk), at<float>(dv)});
}

template <class T>
smyrf::Hashing<T> hashing(const Ints& sizes, const Ints& q, const Ints& k, int64_t mask, int64_t vectors, double scale,
                          int64_t q_order, int64_t k_order, int threads) {
    smyrf::Hashing<T> found;
    found.batch = sizes.at(0), found.heads = sizes.at(1), found.kv_heads = sizes.at(2);
    found.n_queries = sizes.at(3), found.n_keys = sizes.at(4), found.width = sizes.at(5), found.n_hashes = sizes.at(6);
    found.q = rows<const T>(q), found.k = rows<const T>(k);
    found.mask = at<const bool>(mask), found.vectors = at<const T>(vectors), found.scale = static_cast<T>(scale);
    found.q_order = at<int32_t>(q_order), found.k_order = at<int32_t>(k_order), found.threads = threads;
    return found;
}

void sort_by_hash(bool wide, const Ints& sizes, const Ints& q, const Ints& k, int64_t mask, int64_t vectors, double scale,
                  int64_t q_order, int64_t k_order, int threads, const std::string& isa) {
    const smyrf::Kernels& use = kernels(isa);
    if (wide)
        use.sort_by_hash64(hashing<double>(sizes, q, k, mask, vectors, scale, q_order, k_order, threads));
    else
        use.sort_by_hash32(hashing<float>(sizes, q, k, mask, vectors, scale, q_order, k_order, threads));
}

template <class T>
smyrf::Level<T> level(const Ints& sizes, const Ints& tensors, int threads) {
    smyrf::Level<T> found;
    found.n_above = sizes.at(0), found.fan = sizes.at(1), found.n_clusters = sizes.at(2);
    found.n_candidates = sizes.at(3), found.width = sizes.at(4), found.value_width = sizes.at(5);
    found.n_near = sizes.at(6), found.n_far = sizes.at(7), found.leaves_of_own = sizes.at(8);
    found.centroids = at<const T>(tensors.at(0)), found.spread = at<const T>(tensors.at(1));
    found.vectors = at<const T>(tensors.at(2)), found.candidates = at<const int64_t>(tensors.at(3));
    found.hidden = at<const bool>(tensors.at(4)), found.key_spread = at<const T>(tensors.at(5));
    found.weight = at<const T>(tensors.at(6)), found.branch = at<const int64_t>(tensors.at(7));
    found.kept = at<int64_t>(tensors.at(8)), found.far = at<T>(tensors.at(9)), found.bias = at<T>(tensors.at(10));
    found.threads = threads;
    return found;
}

void fold_level(bool wide, const Ints& sizes, const Ints& tensors, int threads, const std::string& isa) {
    const smyrf::Kernels& use = kernels(isa);
    if (wide)
        use.fold_level64(level<double>(sizes, tensors, threads));
    else
        use.fold_level32(level<float>(sizes, tensors, threads));
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("forward", &forward, nb::call_guard<nb::gil_scoped_release>());
    m.def("backward", &backward, nb::call_guard<nb::gil_scoped_release>());
    m.def("sort_by_hash", &sort_by_hash, nb::call_guard<nb::gil_scoped_release>());
    m.def("fold_level", &fold_level, nb::call_guard<nb::gil_scoped_release>());
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const smyrf::Kernels* one : smyrf::available()) names.push_back(one->name);
        return names;
    });
}
