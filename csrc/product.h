// Products of small matrices whose rows are at any addresses.
//
// A tile of the result stays in registers from its first product to its last; then it is stored, or merged into rows
// that are at any addresses too. There are no tails: what is read by vectors is padded with zeros.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "isa.h"
#include "memory.h"
#include "simd.h"

namespace smyrf::SMYRF_ISA {

// A group is worked on in blocks of queries and keys, so that scores stay in the cache.
constexpr int QUERY_BLOCK = 64, KEY_BLOCK = 256;

// The size of nearly equal blocks, none larger than `most`.
inline int64_t block_size(int64_t n, int64_t most) {
    const int64_t n_blocks = (n + most - 1) / most;
    return n_blocks == 0 ? 1 : (n + n_blocks - 1) / n_blocks;
}

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = SMYRF_REGISTERS >= 32 ? 4 : 2;

template <class T>
inline T dot(const T* a, const T* b, int64_t n) {
    constexpr int W = Simd<T>::W;
    Vec<T> sums{};
    int64_t i = 0;
    for (; i + W <= n; i += W) sums += load(a + i) * load(b + i);
    T sum = 0;
    for (int j = 0; j < W; ++j) sum += sums[j];
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// Rows of a matrix: at equal distances, or at any addresses.
template <class T>
struct Strided {
    const T* data;
    int64_t stride;
    const T* operator()(int64_t i) const { return data + i * stride; }
};
template <class T>
struct Scattered {
    const T* const* rows;
    const T* operator()(int64_t i) const { return rows[i]; }
};

// Where a tile goes: it is stored in a matrix …
template <class T>
struct Store {
    T* data;
    int64_t stride;

    template <int R, int K>
    void operator()(int64_t row, int64_t column, const Vec<T> (&sum)[R][K]) const {
        constexpr int W = Simd<T>::W;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < K; ++v) store(data + (row + r) * stride + column + v * W, sum[r][v]);
    }
};
// … or merged into rows at any addresses: row = keep · row + share · tile. If keep is zero the row is not read. A null
// row is skipped.
template <class T>
class Merge {
   public:
    Merge(T* const* to, const T* of_old, const T* of_new, int64_t n)
        : rows_(to), keep_(of_old), share_(of_new), width_(n) {}

    template <int R, int K>
    void operator()(int64_t row, int64_t column, const Vec<T> (&sum)[R][K]) const {
        constexpr int W = Simd<T>::W;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            T* to = rows_[row + r];
            if (to == nullptr) continue;
            to += column;
            const T a = keep_[row + r], b = share_[row + r];
            if (column + K * W > width_) {
                put_tail(sum[r], a, b, width_ - column, to);
            } else if (a == T(0)) {
#pragma GCC unroll 8
                for (int v = 0; v < K; ++v) store(to + v * W, sum[r][v] * b);
            } else {
#pragma GCC unroll 8
                for (int v = 0; v < K; ++v) store(to + v * W, load(to + v * W) * a + sum[r][v] * b);
            }
        }
    }

   private:
    T* const* rows_;
    const T *keep_, *share_;
    int64_t width_;

    // The end of a row whose width is not a multiple of a vector.
    template <int K>
    static void put_tail(const Vec<T> (&sum)[K], T a, T b, int64_t n, T* to) {
        constexpr int W = Simd<T>::W;
        alignas(64) T part[K * W];
        for (int v = 0; v < K; ++v) store(part + v * W, sum[v] * b);
        for (int64_t e = 0; e < n; ++e) to[e] = a == T(0) ? part[e] : to[e] * a + part[e];
    }
};

// Σ_k a[r][k · step] · b[k][v] for R rows and K vectors, handed to `to`.
template <class T, int R, int K, class A, class B, class To>
inline void tile(const A& a, int64_t row, int64_t step, const B& b, int64_t column, int64_t inner, const To& to,
                 Prefetch& prefetch) {
    constexpr int W = Simd<T>::W;
    Vec<T> sum[R][K];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) sum[r][v] = Vec<T>{};
    const T* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = a(row + r);
    const auto add = [&](int64_t k) {
        const T* from = b(k) + column;
        Vec<T> x[K];
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) x[v] = load(from + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> y = fill(rows[r][k * step]);
#pragma GCC unroll 8
            for (int v = 0; v < K; ++v) sum[r][v] += y * x[v];
        }
    };
    int64_t k = 0;
    if (!prefetch.empty())
        for (; k + 4 <= inner; k += 4) {
            const char* piece = prefetch.next();
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) add(k + i), Prefetch::line(piece, i);
        }
    for (; k < inner; ++k) add(k);
    to(row, column, sum);
}

template <class T, int R, class A, class B, class To>
inline void tile_of(int vectors, const A& a, int64_t row, int64_t step, const B& b, int64_t column, int64_t inner,
                    const To& to, Prefetch& prefetch) {
    switch (vectors) {
        case 1: return tile<T, R, 1>(a, row, step, b, column, inner, to, prefetch);
        case 2: return tile<T, R, 2>(a, row, step, b, column, inner, to, prefetch);
#if SMYRF_REGISTERS >= 32
        case 3: return tile<T, R, 3>(a, row, step, b, column, inner, to, prefetch);
        default: return tile<T, R, 4>(a, row, step, b, column, inner, to, prefetch);
#endif
    }
}

// a · b, rows × columns; `columns` is a multiple of a vector. Row r of a is read at a(r)[k · step].
template <class T, class A, class B, class To>
void product(const A& a, int64_t rows, int64_t step, const B& b, int64_t columns, int64_t inner, const To& to,
             Prefetch& prefetch) {
    constexpr int W = Simd<T>::W;
    for (int64_t column = 0; column < columns; column += TILE_VECTORS * W) {
        const int vectors = static_cast<int>(std::min<int64_t>(TILE_VECTORS, (columns - column) / W));
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            switch (std::min<int64_t>(TILE_ROWS, rows - r)) {
                case 1: tile_of<T, 1>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 2: tile_of<T, 2>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 3: tile_of<T, 3>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 4: tile_of<T, 4>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                case 5: tile_of<T, 5>(vectors, a, r, step, b, column, inner, to, prefetch); break;
                default: tile_of<T, 6>(vectors, a, r, step, b, column, inner, to, prefetch);
            }
        }
    }
}

// Packs rows as columns: to[d][i] = factor · rows[i][d], zero where a row is null; `to` has rows of QUERY_BLOCK.
template <class T>
void pack_columns(const T* const* rows, int64_t n, int64_t width, T factor, T* to) {
    constexpr int W = Simd<T>::W;
    for (int64_t i = 0; i < n; i += W) {
        int64_t d = 0;
        for (; d + W <= width; d += W) {
            Vec<T> x[W];
            for (int r = 0; r < W; ++r) {
                const T* row = i + r < n ? rows[i + r] : nullptr;
                x[r] = row ? load(row + d) * factor : Vec<T>{};
            }
            transpose<T>(x);
            for (int r = 0; r < W; ++r) store(to + (d + r) * QUERY_BLOCK + i, x[r]);
        }
        for (; d < width; ++d)
            for (int r = 0; r < W; ++r) {
                const T* row = i + r < n ? rows[i + r] : nullptr;
                to[d * QUERY_BLOCK + i + r] = row ? row[d] * factor : T(0);
            }
    }
}

// Rows that can be read by whole vectors: the rows themselves if the width is a multiple of a vector, else copies
// padded with zeros. A null row is a row of zeros. `list` has room for n pointers.
template <class T>
Scattered<T> whole_vectors(const T* const* rows, int64_t n, int64_t width, const T** list, Buffer<T>& copies) {
    constexpr int W = Simd<T>::W;
    const int64_t padded = round_up(width, W);
    const bool copy = padded != width;
    T* to = copies.get(padded * (copy ? n + 1 : 1));
    const T* zeros = to;
    std::memset(to, 0, padded * sizeof(T));
    for (int64_t i = 0; i < n; ++i) {
        list[i] = rows[i] == nullptr ? zeros : rows[i];
        if (!copy || rows[i] == nullptr) continue;
        to += padded;
        list[i] = to;
        std::memcpy(to, rows[i], width * sizeof(T));
        for (int64_t d = width; d < padded; ++d) to[d] = T(0);
    }
    return {list};
}

}  // namespace smyrf::SMYRF_ISA
