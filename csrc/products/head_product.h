// Products of a few rows with weights of their own for every head.
#pragma once

#include "../common/team.h"
#include "arguments.h"
#include "dot.h"

namespace polyhead::PH_NAMESPACE {

// Columns [first, last) of y[m] = Σ_n x[m, n] · W[n], in the order of n whatever the columns.
template <int M, class T>
void sums_of_rows(const float* x, int64_t x_stride, const T* w, int64_t count, int64_t width, int64_t first,
                  int64_t last, T* y, int64_t y_stride) {
    auto columns = [&](int64_t d, auto number) {
        constexpr int C = number;
        Vec acc[M][C] = {};
        for (int64_t n = 0; n < count; ++n) {
            Vec row[C];
            PH_UNROLL(8) for (int c = 0; c < C; ++c) {
                row[c] = load(w + n * width + d + c * W);
                __builtin_prefetch((const char*)(w + n * width + d + c * W) + kPrefetch, 0, 1);
            }
            PH_UNROLL(4) for (int m = 0; m < M; ++m) {
                const Vec factor = splat(x[m * x_stride + n]);
                PH_UNROLL(8) for (int c = 0; c < C; ++c) acc[m][c] += factor * row[c];
            }
        }
        for (int m = 0; m < M; ++m)
            for (int c = 0; c < C; ++c) store(acc[m][c], y + m * y_stride + d + c * W);
    };
    constexpr int C = M <= 2 ? 8 : 4;
    int64_t d = first;
    for (; d + C * W <= last; d += C * W) columns(d, std::integral_constant<int, C>{});
    for (; d + 4 * W <= last; d += 4 * W) columns(d, std::integral_constant<int, 4>{});
    for (; d + W <= last; d += W) columns(d, std::integral_constant<int, 1>{});
    for (; d < last; ++d)
        for (int m = 0; m < M; ++m) {
            float total = 0;
            for (int64_t n = 0; n < count; ++n) total += x[m * x_stride + n] * to_float(w[n * width + d]);
            round_to(total, y + m * y_stride + d);
        }
}

// A thread's columns (some vectors of them) or rows of all heads' weights.
template <class T> void head_product_of(const HeadProduct& p, int thread, int threads) {
    const int64_t run = p.summed ? 4 * W : 1, each = (p.out_features + run - 1) / run, total = p.heads * each;
    const int64_t to = total * (thread + 1) / threads, x_row = p.heads * p.in_features;
    for (int64_t at = total * thread / threads; at < to;) {
        const int64_t h = at / each, unit = at % each, units = each - unit < to - at ? each - unit : to - at;
        const int64_t first = unit * run;
        const int64_t last = first + units * run < p.out_features ? first + units * run : p.out_features;
        const float* x = p.fp32 + h * p.in_features;
        const T* w = (const T*)p.weight + h * p.weight_head;
        T* y = (T*)p.y + h * p.y_head;
        at += units;
        if (p.summed) {
            int64_t m = 0;
            auto sums = [&](auto rows) {
                sums_of_rows<rows, T>(x + m * x_row, x_row, w, p.in_features, p.out_features, first, last, y + m * p.y_row, p.y_row);
                m += rows;
            };
            while (p.rows - m >= 4) sums(std::integral_constant<int, 4>{});
            while (p.rows - m >= 2) sums(std::integral_constant<int, 2>{});
            while (p.rows - m >= 1) sums(std::integral_constant<int, 1>{});
            continue;
        }
        for (int64_t m = 0; m < p.rows; m += kMostDots) {
            const int64_t rows = p.rows - m < kMostDots ? p.rows - m : kMostDots;
            float found[kMostDots];
            for (int64_t n = first; n < last; ++n) {
                dots_with(x + m * x_row, x_row, rows, w + n * p.in_features, p.in_features, found);
                for (int64_t r = 0; r < rows; ++r) round_to(found[r], y + (m + r) * p.y_row + n);
            }
        }
    }
}

// x as float32 for all heads, which head_product_of reads.
template <class T> void widen_heads(const HeadProduct& p) {
    for (int64_t m = 0; m < p.rows; ++m)
        for (int64_t h = 0; h < p.heads; ++h) {
            const T* x = (const T*)p.x + m * p.x_row + h * p.x_head;
            float* to = p.fp32 + (m * p.heads + h) * p.in_features;
            for (int64_t i = 0; i < p.in_features; ++i) to[i] = to_float(x[i]);
        }
}

inline void head_product(const HeadProduct& p, int threads) {
    with_dtype(p.dtype, [&](auto number) {
        using T = decltype(number);
        widen_heads<T>(p);
        const bool few = p.rows * p.heads * p.in_features * p.out_features < 1 << 16;
        in_team(few ? 1 : threads, [&](int thread, int team) { head_product_of<T>(p, thread, team); });
    });
}

}  // namespace polyhead::PH_NAMESPACE
