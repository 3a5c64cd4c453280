// Which instruction set this machine has.

#include <cstring>

#include "dispatch.h"

namespace smyrf {

extern const Kernels kernels_baseline;
#ifdef SMYRF_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> found = {&kernels_baseline};
#ifdef SMYRF_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found.push_back(&kernels_avx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
            found.push_back(&kernels_avx512);
    }
#endif
    return found;
}

const Kernels* find(const char* name) {
    for (const Kernels* one : available())
        if (std::strcmp(one->name, name) == 0) return one;
    return nullptr;
}

}  // namespace smyrf
