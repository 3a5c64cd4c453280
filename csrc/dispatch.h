// The kernels of the instruction sets that this machine has.
#pragma once

#include <string>
#include <vector>

#include "params.h"

namespace smyrf {

// The same functions, compiled for one instruction set. Parameters have passed `check`.
struct Kernels {
    const char* name;
    void (*attend_forward)(const AttendParams&, const AttendOutput&);
    void (*attend_backward)(const AttendParams&, const AttendGradients&);
    void (*sort_by_hash)(const HashParams&);
    void (*build_tree)(const TreeParams&);
    void (*select_and_fold)(const SelectParams&);
    void (*select_and_fold_backward)(const SelectGradients&);
    void (*tangent_forward)(const TangentParams&, const AttendOutput&);
    void (*tangent_backward)(const TangentParams&, const AttendGradients&);
};

// Kernels that this machine can run, the best last.
const std::vector<const Kernels*>& available();

// The kernels of that name, the best for an empty one. Throws std::invalid_argument if this machine cannot run them.
const Kernels& find(const std::string& name);

}  // namespace smyrf
