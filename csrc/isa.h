// The kernels of one instruction set: SMYRF_ISA names it, SMYRF_BYTES and SMYRF_REGISTERS describe it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "attend.h"
#include "pages.h"

namespace smyrf {
namespace SMYRF_ISA {
#include "simd.h"

#include "product.h"

#include "group.h"

#include "forward.h"

#include "backward.h"

#include "hash.h"

#include "level.h"
}

#define SMYRF_TEXT_(x) #x
#define SMYRF_TEXT(x) SMYRF_TEXT_(x)
#define SMYRF_TABLE_(x) kernels_##x
#define SMYRF_TABLE(x) SMYRF_TABLE_(x)

extern const Kernels SMYRF_TABLE(SMYRF_ISA);
const Kernels SMYRF_TABLE(SMYRF_ISA) = {SMYRF_TEXT(SMYRF_ISA), SMYRF_ISA::forward<float>, SMYRF_ISA::forward<double>,
                                        SMYRF_ISA::backward<float>, SMYRF_ISA::backward<double>,
                                        SMYRF_ISA::sort_by_hash<float>, SMYRF_ISA::sort_by_hash<double>,
                                        SMYRF_ISA::fold_level<float>, SMYRF_ISA::fold_level<double>};
}  // namespace smyrf
