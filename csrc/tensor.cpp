#include "tensor.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace smyrf {
namespace {

// Objects of PyTorch, looked up once and never freed. Methods are those of its classes: an instance attribute of the
// same name must not replace them.
struct Torch {
    PyObject *tensor, *parameter, *strided, *dtypes[5];
    PyObject *shape, *dtype, *layout, *is_cpu;                                                      // names
    PyObject *stride, *is_neg, *data_ptr, *storage, *nbytes, *offset, *element_size, *as_subclass;  // methods

    Torch() {
        const nb::module_ torch = nb::module_::import_("torch");
        const auto keep = [](nb::object object) { return object.release().ptr(); };
        tensor = keep(torch.attr("Tensor")), parameter = keep(torch.attr("nn").attr("Parameter"));
        strided = keep(torch.attr("strided"));
        const char* names[] = {"float32", "float64", "int32", "int16", "bool"};  // in the order of `Dtype`
        for (int i = 0; i < 5; ++i) dtypes[i] = keep(torch.attr(names[i]));
        shape = PyUnicode_InternFromString("shape"), dtype = PyUnicode_InternFromString("dtype");
        layout = PyUnicode_InternFromString("layout"), is_cpu = PyUnicode_InternFromString("is_cpu");
        const nb::object base = torch.attr("_C").attr("TensorBase");
        stride = keep(base.attr("stride")), is_neg = keep(base.attr("is_neg"));
        data_ptr = keep(base.attr("data_ptr")), storage = keep(base.attr("untyped_storage"));
        offset = keep(base.attr("storage_offset")), element_size = keep(base.attr("element_size"));
        as_subclass = keep(base.attr("as_subclass"));
        nbytes = keep(torch.attr("UntypedStorage").attr("nbytes"));
    }
};

const Torch& torch() {
    static const Torch found;
    return found;
}

nb::object checked(PyObject* object) {
    if (object == nullptr) nb::raise_python_error();
    return nb::steal(object);
}
nb::object get(nb::handle object, PyObject* name) { return checked(PyObject_GetAttr(object.ptr(), name)); }
nb::object call(nb::handle object, PyObject* method) { return checked(PyObject_CallOneArg(method, object.ptr())); }
int64_t integer(nb::handle object) {
    const int64_t value = PyLong_AsLongLong(object.ptr());
    if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
    return value;
}

std::string text(nb::handle object) { return nb::str(object).c_str(); }

std::string shape_text(const int64_t* sizes, int n) {
    std::string words = "(";
    for (int i = 0; i < n; ++i)
        words += (i > 0 ? ", " : "") + (sizes[i] == Tensor::ANY ? std::string("…") : std::to_string(sizes[i]));
    return words + ")";
}

const char* dtype_name(Dtype dtype) {
    const char* names[] = {"float32", "float64", "int32", "int16", "bool", "another dtype"};
    return names[static_cast<int>(dtype)];
}

}  // namespace

Tensor::Tensor(nb::handle object, const char* name) : owner_(nb::borrow(object)), name_(name) {
    const Torch& names = torch();
    const auto is_plain = [&] {
        const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(owner_.ptr()));
        return type == names.tensor || type == names.parameter;
    };
    if (!is_plain()) {  // methods of a subclass can return anything
        if (PyObject_IsInstance(owner_.ptr(), names.tensor) != 1)
            throw nb::type_error((std::string(name) + " must be a tensor, not " + text(owner_.type())).c_str());
        owner_ = checked(PyObject_CallFunctionObjArgs(names.as_subclass, owner_.ptr(), names.tensor, nullptr));
        if (!is_plain()) throw nb::type_error((std::string(name) + " must be a plain tensor").c_str());
    }
    if (get(owner_, names.layout).ptr() != names.strided || get(owner_, names.is_cpu).ptr() != Py_True ||
        call(owner_, names.is_neg).ptr() == Py_True)
        throw nb::type_error((std::string(name) + " must be a dense tensor on the CPU").c_str());
    const nb::object dtype = get(owner_, names.dtype), shape = get(owner_, names.shape),
                     strides = call(owner_, names.stride);
    for (int i = 0; i < 5; ++i)
        if (dtype.ptr() == names.dtypes[i]) dtype_ = static_cast<Dtype>(i);
    const int64_t n_axes = static_cast<int64_t>(PyTuple_Size(shape.ptr()));
    if (n_axes > MOST_AXES)
        throw nb::type_error((std::string(name) + " has " + std::to_string(n_axes) + " axes").c_str());
    n_axes_ = static_cast<int>(n_axes);
    bool is_empty = false;
    for (int i = 0; i < n_axes_; ++i) {
        sizes_[i] = integer(PyTuple_GetItem(shape.ptr(), i)), strides_[i] = integer(PyTuple_GetItem(strides.ptr(), i));
        is_empty |= sizes_[i] == 0;
    }
    if (is_empty) return;
    int64_t last = 0;
    for (int i = 0; i < n_axes_; ++i) last += (sizes_[i] - 1) * strides_[i];
    const int64_t element_size = integer(call(owner_, names.element_size));
    const int64_t end = integer(call(owner_, names.offset)) + last + 1;
    if (end * element_size > integer(call(call(owner_, names.storage), names.nbytes)))
        refuse("has a storage that is too small for its shape");
    n_bytes_ = (last + 1) * element_size;
    address_ = reinterpret_cast<void*>(integer(call(owner_, names.data_ptr)));
    if (address_ == nullptr) refuse("has no data");
}

const Tensor& Tensor::expect(Dtype dtype, std::initializer_list<int64_t> shape) const {
    if (dtype_ != dtype)
        throw nb::type_error((std::string(name_) + " has the dtype " + text(get(owner_, torch().dtype)) + ", but " +
                              dtype_name(dtype) + " is needed")
                                 .c_str());
    bool fits = static_cast<int>(shape.size()) == n_axes_;
    int axis = 0;
    for (const int64_t size : shape) {
        fits = fits && (size == ANY || size == sizes_[axis]);
        ++axis;
    }
    if (!fits)
        refuse("has the shape " + shape_text(sizes_, n_axes_) + ", but " +
               shape_text(shape.begin(), static_cast<int>(shape.size())) + " is needed");
    return *this;
}

bool Tensor::is_contiguous_from(int axis) const {
    int64_t expected = 1;
    for (int i = n_axes_ - 1; i >= axis; --i) {
        if (sizes_[i] > 1 && strides_[i] != expected) return false;
        expected *= sizes_[i];
    }
    return true;
}

bool Tensor::overlaps_itself() const {
    int axes[MOST_AXES], n_long = 0;
    for (int i = 0; i < n_axes_ && address_ != nullptr; ++i)
        if (sizes_[i] > 1) axes[n_long++] = i;
    std::sort(axes, axes + n_long, [&](int a, int b) { return strides_[a] < strides_[b]; });
    int64_t last = 0;  // the largest offset along the axes before
    for (int i = 0; i < n_long; ++i) {
        if (strides_[axes[i]] <= last) return true;
        last += (sizes_[axes[i]] - 1) * strides_[axes[i]];
    }
    return false;
}

void* Tensor::contiguous() const {
    if (address_ != nullptr && !is_contiguous_from(0)) refuse("must be contiguous");
    return address_;
}

Rows Tensor::rows() const {
    if (address_ != nullptr && !is_contiguous_from(3)) refuse("must be contiguous along its last axis");
    return {address_, strides_[0], strides_[1], strides_[2]};
}

void* Tensor::contiguous_rows(int64_t& row_stride) const {
    if (address_ != nullptr && !is_contiguous_from(1)) refuse("must have contiguous rows");
    row_stride = strides_[0];
    return address_;
}

void Tensor::refuse(const std::string& why) const { throw std::invalid_argument(std::string(name_) + " " + why); }

void Arguments::check_outputs() const {
    std::vector<const Argument*> by_address;
    for (const Argument& one : all_)
        if (one.tensor.begin() != nullptr) by_address.push_back(&one);
    std::sort(by_address.begin(), by_address.end(),
              [](const Argument* a, const Argument* b) { return a->tensor.begin() < b->tensor.begin(); });
    const Tensor *farthest = nullptr, *farthest_output = nullptr;  // of those before, the ones that end last
    for (const Argument* one : by_address) {
        const Tensor& tensor = one->tensor;
        if (one->is_output && tensor.overlaps_itself())
            throw std::invalid_argument(std::string(tensor.name()) + " must not repeat its elements");
        const Tensor* before = one->is_output ? farthest : farthest_output;
        if (before != nullptr && tensor.begin() < before->end())
            throw std::invalid_argument(std::string(tensor.name()) + " shares memory with " + before->name());
        if (farthest == nullptr || tensor.end() > farthest->end()) farthest = &tensor;
        if (one->is_output && (farthest_output == nullptr || tensor.end() > farthest_output->end()))
            farthest_output = &tensor;
    }
}

}  // namespace smyrf
