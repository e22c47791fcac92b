// GEMV: y = x Wᵀ + b for up to kMaxGemvRows rows of x: what decoding waits for is reading W, once, from first to last.
//
// Every thread walks its own range of rows of W in the order of memory, one row (or two) at a time:
// several rows side by side are several streams, which the processor prefetches worse (measured:
// 36 GB/s for one stream a thread, 20 for four).
#pragma once

#include "../common/team.h"
#include "rows.h"
#include "../quantized/int8_activations.h"

namespace polyhead::PH_NAMESPACE {

// done(n, dots of row n of a weight with every row of x [rows, K]) for n in [first, last). What a weight
// consists of is asked once: asked for every row, it made a head of 49,152 rows a fifth slower.
template <class T, class Done>
inline void over_rows(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, Done&& done) {
    if (f.int8_activations) return over_rows_int8(x, rows, K, f, first, last, done);
    if (f.type && rows == 1) return over_blocks_of_rows(x, K, f, first, last, done);
    float found[kMaxGemvRows];
    if (f.type) {
        for (int64_t n = first; n < last; ++n) {
            quantized_dots(x, K, rows, f, n, K, found);
            done(n, found);
        }
        return;
    }
    const T* w = (const T*)f.weight + first * K;
    for (int64_t n = first; n < last; ++n, w += K) {
        dots_with(x, K, rows, w, K, found);
        done(n, found);
    }
}

// y[m, n] for n in [first, last) of one weight.
template <class T, class Y>
void gemv_rows(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last,
                 Y* y, int64_t y_stride) {
    const T* bias = (const T*)f.bias;
    over_rows<T>(x, rows, K, f, first, last, [&](int64_t n, const float* found) {
        for (int64_t m = 0; m < rows; ++m)
            round_to(found[m] + (bias ? to_float(bias[n]) : 0.0f), y + m * y_stride + n);
    });
}

template <class T> void gemv_of(const Gemv& p, int thread, int threads) {
    // Rows of all weights are one range, which threads divide evenly.
    int64_t total = 0;
    for (int i = 0; i < p.count; ++i) total += p.weights[i].out_features;
    const int64_t from = total * thread / threads, to = total * (thread + 1) / threads;
    int64_t column = 0;
    for (int i = 0; i < p.count; ++i) {
        const LinearWeight& f = p.weights[i];
        const int64_t first = from > column ? from - column : 0;
        const int64_t last = to - column < f.out_features ? to - column : f.out_features;
        if (first < last)
            gemv_rows<T>(p.x, p.rows, p.in_features, f, first, last, (T*)p.y + column, p.y_stride);
        column += f.out_features;
    }
}

inline void gemv(const Gemv& p, int threads) {
    in_team(threads, [&](int thread, int team) {
        with_dtype(p.dtype, [&](auto number) { gemv_of<decltype(number)>(p, thread, team); });
    });
}

}  // namespace polyhead::PH_NAMESPACE
