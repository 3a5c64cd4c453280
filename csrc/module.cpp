// The Python module `smyrf._native`: the structs of params.h with keyword constructors, and the kernels.
//
// A keyword and the member that it sets are one word of this file, so that they cannot be confused. An address is an
// integer, `tensor.data_ptr()`; 0 stands for no tensor. Callers keep the tensors alive.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "params.h"

namespace nb = nanobind;

namespace {

// Each assigns a value from Python to a member, and returns false if it has another type.
template <class T>
bool assign(T& member, nb::handle value) {
    return nb::try_cast(value, member);
}
template <class T>
bool assign(T*& member, nb::handle value) {
    uintptr_t address = 0;
    if (!nb::try_cast(value, address)) return false;
    member = reinterpret_cast<T*>(address);
    return true;
}
bool assign(smyrf::FarKeys& member, nb::handle value) { return value.is_none() || nb::try_cast(value, member); }

template <class Struct>
struct Field {
    const char* name;
    bool required;
    bool (*set)(Struct&, nb::handle);
    PyObject* keyword;  // interned, and never freed

    Field(const char* n, bool is_required, bool (*setter)(Struct&, nb::handle))
        : name(n), required(is_required), set(setter), keyword(PyUnicode_InternFromString(n)) {}
};

#define REQUIRED(member) {#member, true, [](auto& object, nb::handle value) { return assign(object.member, value); }}
#define OPTIONAL(member) {#member, false, [](auto& object, nb::handle value) { return assign(object.member, value); }}

// Binds a struct with a constructor that takes exactly these keywords.
template <class Struct>
void bind(nb::module_& m, const char* struct_name, const std::vector<Field<Struct>>& fields) {
    nb::class_<Struct>(m, struct_name).def("__init__", [fields, struct_name](Struct* self, const nb::kwargs& given) {
        const auto refuse = [&](const std::string& why) {
            throw nb::type_error((std::string(struct_name) + ": " + why).c_str());
        };
        Struct built;
        size_t n_found = 0;
        for (const Field<Struct>& field : fields) {
            PyObject* value = PyDict_GetItemWithError(given.ptr(), field.keyword);
            if (value == nullptr) {
                if (field.required) refuse(std::string("missing argument ") + field.name);
                continue;
            }
            ++n_found;
            if (!field.set(built, value)) refuse(std::string(field.name) + " has the wrong type, or is out of range");
        }
        if (n_found != given.size()) {
            std::string unknown;
            for (const auto& [key, value] : given) {
                bool known = false;
                for (const Field<Struct>& field : fields) known |= nb::cast<std::string>(key) == field.name;
                if (!known) unknown += " " + nb::cast<std::string>(key);
            }
            refuse("unexpected argument" + unknown);
        }
        new (self) Struct(std::move(built));
    });
}

void bind_structs(nb::module_& m) {
    bind<smyrf::Execution>(m, "Execution", {REQUIRED(double_precision), REQUIRED(threads), OPTIONAL(isa)});
    bind<smyrf::Rows>(m, "Rows",
                      {REQUIRED(address), REQUIRED(batch_stride), REQUIRED(head_stride), REQUIRED(row_stride)});
    bind<smyrf::FarKeys>(m, "FarKeys",
                         {REQUIRED(n_rows), REQUIRED(n_per_group), REQUIRED(keys), REQUIRED(values), REQUIRED(bias),
                          REQUIRED(index), OPTIONAL(d_keys), OPTIONAL(d_values), OPTIONAL(d_bias)});
    bind<smyrf::GroupList>(m, "GroupList",
                           {REQUIRED(n_groups), REQUIRED(n_query_slots), REQUIRED(n_key_slots), REQUIRED(queries),
                            REQUIRED(queries_row_stride), REQUIRED(keys), REQUIRED(keys_row_stride), REQUIRED(causal),
                            OPTIONAL(multiplicity), OPTIONAL(far)});
    bind<smyrf::AttendParams>(
        m, "AttendParams",
        {REQUIRED(execution), REQUIRED(batch), REQUIRED(heads), REQUIRED(kv_heads), REQUIRED(n_queries),
         REQUIRED(n_keys), REQUIRED(width), REQUIRED(value_width), REQUIRED(q), REQUIRED(k), REQUIRED(v),
         REQUIRED(lists), REQUIRED(scale), OPTIONAL(dropout_p), OPTIONAL(seed)});
    bind<smyrf::AttendOutput>(m, "AttendOutput", {REQUIRED(out), REQUIRED(lse)});
    bind<smyrf::AttendGradients>(
        m, "AttendGradients", {REQUIRED(grad), REQUIRED(out), REQUIRED(lse), REQUIRED(dq), REQUIRED(dk), REQUIRED(dv)});
    bind<smyrf::HashParams>(
        m, "HashParams",
        {REQUIRED(execution), REQUIRED(batch), REQUIRED(heads), REQUIRED(kv_heads), REQUIRED(n_queries),
         REQUIRED(n_keys), REQUIRED(width), REQUIRED(n_hashes), REQUIRED(q), REQUIRED(k), OPTIONAL(key_mask),
         REQUIRED(vectors), REQUIRED(scale), REQUIRED(q_order), REQUIRED(k_order)});
    bind<smyrf::LevelParams>(m, "LevelParams",
                             {REQUIRED(execution),
                              REQUIRED(batch),
                              REQUIRED(heads),
                              REQUIRED(kv_heads),
                              REQUIRED(n_keys),
                              REQUIRED(width),
                              REQUIRED(value_width),
                              REQUIRED(k),
                              REQUIRED(v),
                              OPTIONAL(key_mask),
                              REQUIRED(order),
                              REQUIRED(leaf_of_key),
                              REQUIRED(key_spread),
                              REQUIRED(value_weight),
                              REQUIRED(n_parents),
                              REQUIRED(fan_out),
                              REQUIRED(n_candidates),
                              REQUIRED(n_near),
                              REQUIRED(n_far),
                              OPTIONAL(candidates),
                              REQUIRED(leaves_per_cluster),
                              REQUIRED(centroids),
                              REQUIRED(spread),
                              REQUIRED(kept),
                              REQUIRED(kept_row_stride),
                              REQUIRED(far_keys),
                              REQUIRED(far_keys_row_stride),
                              REQUIRED(far_values),
                              REQUIRED(far_values_row_stride),
                              REQUIRED(far_bias),
                              REQUIRED(far_bias_row_stride)});
}

const smyrf::Kernels& kernels(const smyrf::Execution& execution) { return smyrf::find(execution.isa); }

void attend_forward(const smyrf::AttendParams& params, const smyrf::AttendOutput& output) {
    check(params, output);
    kernels(params.execution).attend_forward(params, output);
}

void attend_backward(const smyrf::AttendParams& params, const smyrf::AttendGradients& gradients) {
    check(params, gradients);
    kernels(params.execution).attend_backward(params, gradients);
}

void sort_by_hash(const smyrf::HashParams& params) {
    check(params);
    kernels(params.execution).sort_by_hash(params);
}

void fold_level(const smyrf::LevelParams& params) {
    check(params);
    kernels(params.execution).fold_level(params);
}

}  // namespace

NB_MODULE(_native, m) {
    bind_structs(m);
    m.def("attend_forward", &attend_forward, nb::call_guard<nb::gil_scoped_release>());
    m.def("attend_backward", &attend_backward, nb::call_guard<nb::gil_scoped_release>());
    m.def("sort_by_hash", &sort_by_hash, nb::call_guard<nb::gil_scoped_release>());
    m.def("fold_level", &fold_level, nb::call_guard<nb::gil_scoped_release>());
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const smyrf::Kernels* one : smyrf::available()) names.push_back(one->name);
        return names;
    });
}
