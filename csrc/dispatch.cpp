#include "dispatch.h"

#include <stdexcept>

namespace smyrf {

extern const Kernels kernels_baseline;
#ifdef SMYRF_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const std::vector<const Kernels*>& available() {
    static const std::vector<const Kernels*> all = [] {
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
    }();
    return all;
}

const Kernels& find(const std::string& name) {
    if (name.empty()) return *available().back();
    for (const Kernels* one : available())
        if (name == one->name) return *one;
    throw std::invalid_argument("isa='" + name + "' cannot be run on this machine");
}

}  // namespace smyrf
