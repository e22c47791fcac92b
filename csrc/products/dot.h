// Dot products of a row of weights with a few rows of x.
#pragma once

#include "../common/registers.h"

namespace polyhead::PH_NAMESPACE {

constexpr int kPrefetch = 4096;  // bytes ahead

// Sums of a row: as many as additions need to keep up with memory. Not more for one row than for eight: a
// row gets the same bits beside others and alone.
constexpr int kSums = PH_WIDTH == 16 ? 1 : 2;

template <int M, class T>
inline void dot_rows(const float* x, int64_t stride, const T* w, int64_t K, float* found) {
    constexpr int S = kSums;
    Vec acc[S][M] = {};
    int64_t k = 0;
    for (; k + S * W <= K; k += S * W) {
        __builtin_prefetch((const char*)(w + k) + kPrefetch, 0, 1);
        if (S * W * sizeof(T) > 64) __builtin_prefetch((const char*)(w + k) + kPrefetch + 64, 0, 1);
        if (S * W * sizeof(T) > 128) {
            __builtin_prefetch((const char*)(w + k) + kPrefetch + 128, 0, 1);
            __builtin_prefetch((const char*)(w + k) + kPrefetch + 192, 0, 1);
        }
        PH_UNROLL(4) for (int s = 0; s < S; ++s) {
            const Vec column = load(w + k + s * W);
            PH_UNROLL(8) for (int m = 0; m < M; ++m) acc[s][m] = multiply_add(acc[s][m], column, load(x + m * stride + k + s * W));
        }
    }
    for (; k + W <= K; k += W) {
        const Vec column = load(w + k);
        for (int m = 0; m < M; ++m) acc[0][m] = multiply_add(acc[0][m], column, load(x + m * stride + k));
    }
    for (int m = 0; m < M; ++m) {
        Vec all = acc[0][m];
        for (int s = 1; s < S; ++s) all += acc[s][m];
        float total = sum(all);
        for (int64_t rest = k; rest < K; ++rest) total = multiply_add(total, to_float(w[rest]), x[m * stride + rest]);
        found[m] = total;
    }
}

#if PH_PAIRS
// The same for bfloat16, by the processor's instruction for pairs of neighbours: x is rounded to what W consists of. The
// last pairs are filled up with zeros, as in GEMM.
template <int M>
inline void dot_rows(const float* x, int64_t stride, const BFloat16* w, int64_t K, float* found) {
    Vec acc[M] = {};
    auto add = [&](const float* from, int64_t step, const BFloat16* columns) {
        const Vec column = load_any<Vec>(columns);
        PH_UNROLL(8) for (int m = 0; m < M; ++m) acc[m] = multiply_add_pairs(acc[m], column, pairs_of(from + m * step));
    };
    int64_t k = 0;
    for (; k + 2 * W <= K; k += 2 * W) {
        __builtin_prefetch((const char*)(w + k) + kPrefetch, 0, 1);
        add(x + k, stride, w + k);
    }
    if (k < K) {
        float last[M * 2 * W] = {};
        BFloat16 columns[2 * W] = {};
        for (int m = 0; m < M; ++m) __builtin_memcpy(last + m * 2 * W, x + m * stride + k, (K - k) * sizeof *x);
        __builtin_memcpy(columns, w + k, (K - k) * sizeof *w);
        add(last, 2 * W, columns);
    }
    for (int m = 0; m < M; ++m) found[m] = sum(acc[m]);
}
#endif

constexpr int64_t kMostDots = 8;

// dots[m] of one row of W with every row of x, up to kMostDots.
template <class T>
inline void dots_with(const float* x, int64_t stride, int64_t rows, const T* w, int64_t K, float* found) {
    with_constant<kMostDots>(rows, [&](auto m) { dot_rows<m>(x, stride, w, K, found); });
}

}  // namespace polyhead::PH_NAMESPACE
