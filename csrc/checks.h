// Checks of sizes and indices, before a kernel reads or writes anything. Addresses are tensor.h's concern.
#pragma once

#include "params.h"

namespace smyrf {

// Each throws std::invalid_argument for sizes that cannot be, and std::out_of_range for an index outside of its tensor.
void check(const AttendParams& params);
void check(const HashParams& params);
void check(const TreeParams& params);
void check(const SelectParams& params);
void check(const SelectGradients& params);
void check(const TangentParams& params);
void check_sizes(const Span<LevelSizes>& levels);  // bounds the sums of `LevelTotals`
void check_saved(const TangentParams& params);     // what `tangent_forward` has written, before backward reads it

}  // namespace smyrf
