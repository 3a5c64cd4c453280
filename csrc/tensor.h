// Tensors of PyTorch as Python hands them over: address, shape, strides and dtype, all checked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <string>

#include "params.h"

namespace smyrf {

enum class Dtype { float32, float64, int32, int16, boolean, other };

// A dense CPU tensor of which every element lies inside of its storage.
class Tensor {
   public:
    static constexpr int64_t ANY = -1;  // as a size that is expected

    // Throws TypeError for anything that is not one.
    Tensor(nanobind::handle object, const char* name);

    int64_t size(int axis) const { return sizes_[axis]; }
    Dtype dtype() const { return dtype_; }
    const char* name() const { return name_; }
    // The bytes between its first and its last element; none for an empty tensor.
    const char* begin() const { return static_cast<const char*>(address_); }
    const char* end() const { return begin() + n_bytes_; }
    // Whether two indices can mean the same element.
    bool overlaps_itself() const;
    bool is_floating_point() const { return dtype_ == Dtype::float32 || dtype_ == Dtype::float64; }

    // Throws unless it has this dtype and shape.
    const Tensor& expect(Dtype dtype, std::initializer_list<int64_t> shape) const;
    // The address; throws unless the elements are contiguous.
    void* contiguous() const;
    // Address and strides of (batch, heads, length, width); throws unless the last axis is contiguous.
    Rows rows() const;
    // The address of (B, …); throws unless each of the B is contiguous. `row_stride` is the distance of two.
    void* contiguous_rows(int64_t& row_stride) const;

   private:
    static constexpr int MOST_AXES = 5;

    nanobind::object owner_;
    const char* name_;
    void* address_ = nullptr;
    int64_t n_bytes_ = 0;
    int n_axes_ = 0;
    int64_t sizes_[MOST_AXES] = {}, strides_[MOST_AXES] = {};
    Dtype dtype_ = Dtype::other;

    bool is_contiguous_from(int axis) const;
    [[noreturn]] void refuse(const std::string& why) const;
};

// The tensors of one call. They stay alive until it ends.
class Arguments {
   public:
    const Tensor& input(nanobind::handle object, const char* name) { return add(object, name, false); }
    const Tensor& output(nanobind::handle object, const char* name) { return add(object, name, true); }

    // Throws if an output shares memory with another tensor or with itself: a kernel would overwrite what was checked,
    // or two threads would write the same element.
    void check_outputs() const;

   private:
    struct Argument {
        Tensor tensor;
        bool is_output;
    };

    const Tensor& add(nanobind::handle object, const char* name, bool is_output) {
        return all_.emplace_back(Argument{Tensor(object, name), is_output}).tensor;
    }

    std::deque<Argument> all_;  // elements of a deque do not move
};

}  // namespace smyrf
