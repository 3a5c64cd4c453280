#pragma once

#include <vector>

#include "attend.h"

namespace smyrf {

// Kernels that this machine can run, the best one last.
std::vector<const Kernels*> available();

// The kernels of that name, or null.
const Kernels* find(const char* name);

}  // namespace smyrf
