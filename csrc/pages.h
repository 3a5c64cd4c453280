// Large pages for results that are written at random: a small page has to be looked up for almost every row.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace smyrf {

// A hint, before memory is first written; it changes nothing but the time.
inline void prefer_large_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr int64_t LARGE = 1 << 21;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + LARGE - 1) / LARGE * LARGE;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / LARGE * LARGE;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

}  // namespace smyrf
