// The kernels of one instruction set, as a table. Included by baseline.cpp, avx2.cpp and avx512.cpp.
#pragma once

#include "attend_backward.h"
#include "attend_forward.h"
#include "dispatch.h"
#include "fold_backward.h"
#include "hash.h"
#include "isa.h"
#include "level.h"
#include "params.h"
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
inline void fold_level(const LevelParams& params) {
    params.execution.double_precision ? fold_level<double>(params) : fold_level<float>(params);
}
inline void fold_level_backward(const LevelGradients& params) {
    params.execution.double_precision ? fold_level_backward<double>(params) : fold_level_backward<float>(params);
}

}  // namespace SMYRF_ISA

#define SMYRF_TEXT_(x) #x
#define SMYRF_TEXT(x) SMYRF_TEXT_(x)
#define SMYRF_TABLE_(x) kernels_##x
#define SMYRF_TABLE(x) SMYRF_TABLE_(x)

extern const Kernels SMYRF_TABLE(SMYRF_ISA);
const Kernels SMYRF_TABLE(SMYRF_ISA) = {
    SMYRF_TEXT(SMYRF_ISA), SMYRF_ISA::attend_forward, SMYRF_ISA::attend_backward,    SMYRF_ISA::sort_by_hash,
    SMYRF_ISA::build_tree, SMYRF_ISA::fold_level,     SMYRF_ISA::fold_level_backward};

}  // namespace smyrf
