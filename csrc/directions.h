// The directions in which queries and keys differ most as far as their inner products are concerned.
//
// With Σ_q and Σ_k the covariances, W spans the leading eigenvectors of Σ_k Σ_q, scaled so that Wᵀ Σ_k⁻¹ W = I: a few
// steps of subspace iteration, W ← Σ_k Σ_q W, from the coordinates with the largest variances.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "isa.h"
#include "memory.h"
#include "product.h"
#include "simd.h"

namespace smyrf::SMYRF_ISA {

constexpr int64_t COVARIANCE_SAMPLES = 512;
constexpr int SUBSPACE_STEPS = 4;

template <class T>
inline T zero_unless_finite(T x) {
    return x - x == T(0) ? x : T(0);
}

// The covariance (D, D) of n vectors, in units in which the largest coordinate is one. Numbers that are not finite
// count as zero.
template <class T, class Rows>
void covariance(const Rows& rows, int64_t n, int64_t width, Buffer<T>& memory, double* to) {
    constexpr int W = Simd<T>::W;
    const int64_t columns = round_up(width, W);
    T* x = memory.get((n + 2 * width) * columns);
    T *gram = x + n * columns, *mean = gram + width * columns;
    T most = 0;
    for (int64_t i = 0; i < n; ++i) {
        T* row = x + i * columns;
        const T* from = rows(i);
        for (int64_t d = 0; d < width; ++d) {
            row[d] = zero_unless_finite(from[d]);
            most = std::max(most, std::abs(row[d]));
        }
        for (int64_t d = width; d < columns; ++d) row[d] = T(0);
    }
    const T unit = T(1) / std::max(most, std::numeric_limits<T>::min());
    std::fill_n(mean, columns, T(0));
    for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < columns; ++d) mean[d] += x[i * columns + d] *= unit;
    for (int64_t d = 0; d < columns; ++d) mean[d] /= static_cast<T>(std::max<int64_t>(n, 1));
    for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < columns; ++d) x[i * columns + d] -= mean[d];
    Prefetch none;
    product<T>(Strided<T>{x, 1}, width, columns, Strided<T>{x, columns}, columns, n, Store<T>{gram, columns}, none);
    for (int64_t i = 0; i < width; ++i)
        for (int64_t d = 0; d < width; ++d)
            to[i * width + d] =
                static_cast<double>(gram[i * columns + d]) / static_cast<double>(std::max<int64_t>(n, 1));
}

// a · x for a (D, D) and x (D, r).
inline void multiply(const double* a, const double* x, int64_t width, int64_t rank, double* to) {
    std::fill_n(to, width * rank, 0.0);
    for (int64_t i = 0; i < width; ++i)
        for (int64_t j = 0; j < width; ++j) {
            const double y = a[i * width + j];
            for (int64_t r = 0; r < rank; ++r) to[i * rank + r] += y * x[j * rank + r];
        }
}

// W (D, r) from the covariances.
inline void subspace(const double* sigma_q, double* sigma_k, int64_t width, int64_t rank, Buffer<double>& memory,
                     double* w) {
    double* z = memory.get(width * rank + rank * rank + rank + width);
    double *gram = z + width * rank, *norm = gram + rank * rank, *variance = norm + rank;
    // Few different keys do not give full rank: the floor is well above the rounding of float.
    double sum_k = 0.0;
    for (int64_t d = 0; d < width; ++d) sum_k += sigma_k[d * width + d];
    for (int64_t d = 0; d < width; ++d) sigma_k[d * width + d] += std::max(1e-5 * sum_k, 1e-12);
    // The start: unit vectors of the coordinates with the largest products of variances, of equal ones the first.
    std::fill_n(w, width * rank, 0.0);
    for (int64_t d = 0; d < width; ++d) variance[d] = sigma_q[d * width + d] * sigma_k[d * width + d];
    for (int64_t r = 0; r < rank; ++r) {
        int64_t best = 0;
        for (int64_t d = 1; d < width; ++d)
            if (variance[d] > variance[best]) best = d;
        variance[best] = -1.0;
        w[best * rank + r] = 1.0;
    }
    for (int step = 0; step < SUBSPACE_STEPS; ++step) {
        multiply(sigma_q, w, width, rank, z);
        std::fill_n(norm, rank, 0.0);
        for (int64_t d = 0; d < width; ++d)
            for (int64_t r = 0; r < rank; ++r) norm[r] += z[d * rank + r] * z[d * rank + r];
        for (int64_t r = 0; r < rank; ++r)
            norm[r] = 1.0 / std::max(std::sqrt(norm[r]), std::numeric_limits<double>::min());
        for (int64_t d = 0; d < width; ++d)
            for (int64_t r = 0; r < rank; ++r) z[d * rank + r] *= norm[r];
        multiply(sigma_k, z, width, rank, w);
        std::fill_n(gram, rank * rank, 0.0);
        for (int64_t d = 0; d < width; ++d)
            for (int64_t i = 0; i < rank; ++i)
                for (int64_t r = 0; r <= i; ++r) gram[i * rank + r] += z[d * rank + i] * w[d * rank + r];
        double trace = 0.0;
        for (int64_t r = 0; r < rank; ++r) trace += gram[r * rank + r];
        const double floor = 1e-9 * trace / static_cast<double>(rank) + std::numeric_limits<double>::min();
        // Cholesky's factor of the Gram matrix, then w ← w L⁻ᵀ.
        for (int64_t i = 0; i < rank; ++i)
            for (int64_t j = 0; j <= i; ++j) {
                double sum = gram[i * rank + j] + (i == j ? floor : 0.0);
                for (int64_t l = 0; l < j; ++l) sum -= gram[i * rank + l] * gram[j * rank + l];
                gram[i * rank + j] = i == j ? std::sqrt(std::max(sum, floor)) : sum / gram[j * rank + j];
            }
        for (int64_t d = 0; d < width; ++d)
            for (int64_t i = 0; i < rank; ++i) {
                double sum = w[d * rank + i];
                for (int64_t l = 0; l < i; ++l) sum -= gram[i * rank + l] * w[d * rank + l];
                w[d * rank + i] = sum / gram[i * rank + i];
            }
    }
}

}  // namespace smyrf::SMYRF_ISA
