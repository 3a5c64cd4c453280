// Memory: typed addresses, buffers that a thread keeps, large pages, prefetching.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "isa.h"
#include "params.h"

namespace smyrf::SMYRF_ISA {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// An address of `params.h` as one of numbers.
template <class T>
inline const T* typed(const void* address) {
    return static_cast<const T*>(address);
}
template <class T>
inline T* typed(void* address) {
    return static_cast<T*>(address);
}

// The first row of one head; null for an empty tensor.
template <class T>
inline const T* head_of(const Rows& rows, int64_t batch, int64_t head) {
    if (rows.address == nullptr) return nullptr;
    return typed<T>(rows.address) + batch * rows.batch_stride + head * rows.head_stride;
}

// An element of one row of a part of a tensor.
template <class T>
inline T* part(const Part& of, int64_t row, int64_t at) {
    return typed<T>(of.address) + row * of.row_stride + at;
}

// A hint for memory that is written at random, before it is first written: almost every row is on another small page.
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

// Aligned memory that only grows, so that a thread can keep it from call to call.
template <class T>
class Buffer {
   public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // At least n elements, of which the first `keep` have their old values.
    T* get(int64_t n, int64_t keep = 0) {
        if (n > size_) {
            constexpr int64_t MOST = (std::numeric_limits<int64_t>::max() - 64) / static_cast<int64_t>(sizeof(T));
            T* data = n > MOST ? nullptr : static_cast<T*>(std::aligned_alloc(64, round_up(n * sizeof(T), 64)));
            if (data == nullptr) throw std::bad_alloc();
            if (keep > 0) std::memcpy(static_cast<void*>(data), data_, keep * sizeof(T));
            std::free(data_);
            data_ = data, size_ = n;
        }
        return data_;
    }
    T& operator[](int64_t i) { return data_[i]; }
    const T& operator[](int64_t i) const { return data_[i]; }
    T* data() { return data_; }
    const T* data() const { return data_; }

    // Frees what only a very long sequence needs.
    void trim() {
        constexpr int64_t MAX_KEPT_BYTES = 1 << 24;
        if (size_ * static_cast<int64_t>(sizeof(T)) <= MAX_KEPT_BYTES) return;
        std::free(data_);
        data_ = nullptr, size_ = 0;
    }

   private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// Rows that will be needed next, fetched during the present products in pieces of four cache lines. A burst of
// prefetches would stall; between multiplications they are free.
class Prefetch {
   public:
    void clear() { n_ = next_ = 0; }

    // Queues the rows at `index` of a table; strides and sizes are in bytes. Negative indices fetch in vain.
    void add(const void* table, int64_t stride, int64_t bytes, const int32_t* index, int64_t n) {
        const int64_t pieces = (bytes + PIECE - 1) / PIECE;
        const char *data = static_cast<const char*>(table), **to = queue_.get(n_ + n * pieces + 1, n_) + n_;
        for (int64_t piece = 0; piece < pieces; ++piece, to += n)
            for (int64_t i = 0; i < n; ++i) to[i] = data + index[i] * stride + piece * PIECE;
        n_ += n * pieces;
        *to = data;  // fetched when the queue is empty
    }
    bool empty() const { return n_ == 0; }
    const char* next() {
        const char* piece = queue_[next_];
        next_ += next_ < n_;
        return piece;
    }
    static void line(const char* piece, int number) { __builtin_prefetch(piece + 64 * number, 0, 2); }

    // Fetches the rest of the queue, for groups with many rows and few products.
    void finish() {
        while (next_ < n_) {
            const char* piece = next();
            for (int i = 0; i < 4; ++i) line(piece, i);
        }
    }

   private:
    static constexpr int64_t PIECE = 256;
    Buffer<const char*> queue_;
    int64_t n_ = 0, next_ = 0;
};

// The buffers of one thread.
template <class T>
struct Scratch {
    Prefetch prefetch;
    Buffer<T> queries, grads, query_rows, grad_rows, scores, dscores, key_rows, values, zeros;
    Buffer<const T*> pointers[4];

    static Scratch& mine() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

}  // namespace smyrf::SMYRF_ISA
