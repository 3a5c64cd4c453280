// The kernels of one instruction set, as a table. Included by baseline.cpp, avx2.cpp and avx512.cpp.
#pragma once

#include "attend_backward.h"
#include "attend_forward.h"
#include "dispatch.h"
#include "hash.h"
#include "isa.h"
#include "params.h"
#include "selection.h"
#include "tangent.h"
#include "tree.h"

namespace smyrf {
namespace SMYRF_ISA {

inline void attend_forward(const AttendParams& params, const AttendOutput& output) {
    params.execution.double_precision ? attend_forward<double>(params, output) : attend_forward<float>(params, output);
}
inline void attend_backward(const AttendParams& params, const AttendGradients& gradients) {
    params.execution.double_precision ? attend_backward<double>(params, gradients)
                                      : attend_backward<float>(params, gradients);
}
inline void sort_by_hash(const HashParams& params) {
    params.execution.double_precision ? sort_by_hash<double>(params) : sort_by_hash<float>(params);
}
inline void build_tree(const TreeParams& params) {
    params.execution.double_precision ? build_tree<double>(params) : build_tree<float>(params);
}
inline void select_and_fold(const SelectParams& params) {
    params.execution.double_precision ? select_and_fold<double>(params) : select_and_fold<float>(params);
}
inline void select_and_fold_backward(const SelectGradients& params) {
    params.execution.double_precision ? select_and_fold_backward<double>(params)
                                      : select_and_fold_backward<float>(params);
}

inline void tangent_forward(const TangentParams& params, const AttendOutput& output) {
    params.execution.double_precision ? tangent_forward<double>(params, output)
                                      : tangent_forward<float>(params, output);
}
inline void tangent_backward(const TangentParams& params, const AttendGradients& gradients) {
    params.execution.double_precision ? tangent_backward<double>(params, gradients)
                                      : tangent_backward<float>(params, gradients);
}

}  // namespace SMYRF_ISA

#define SMYRF_TEXT_(x) #x
#define SMYRF_TEXT(x) SMYRF_TEXT_(x)
#define SMYRF_TABLE_(x) kernels_##x
#define SMYRF_TABLE(x) SMYRF_TABLE_(x)

extern const Kernels SMYRF_TABLE(SMYRF_ISA);
const Kernels SMYRF_TABLE(SMYRF_ISA) = {SMYRF_TEXT(SMYRF_ISA),
                                        SMYRF_ISA::attend_forward,
                                        SMYRF_ISA::attend_backward,
                                        SMYRF_ISA::sort_by_hash,
                                        SMYRF_ISA::build_tree,
                                        SMYRF_ISA::select_and_fold,
                                        SMYRF_ISA::select_and_fold_backward,
                                        SMYRF_ISA::tangent_forward,
                                        SMYRF_ISA::tangent_backward};

}  // namespace smyrf
