// GEMV: y = x Wᵀ + b for up to kMaxStepRows rows of x: what decoding waits for is reading W, once, from first to last.
//
// Every thread walks its own range of rows of W in the order of memory. One row of x meets one row (or a few in blocks) at
// a time: several rows side by side are several streams, which the processor prefetches worse (measured: 36 GB/s for one
// stream a thread, 20 for four). More rows of x meet tiles of columns.
#pragma once

#include "../common/team.h"
#include "rows.h"
#include "tiles.h"
#include "../quantized/int8_dots.h"
#include "../quantized/int8_lanes.h"

namespace polyhead::PH_NAMESPACE {

// Dots of rows [row, row + rows) of x with rows [column, column + columns) of a weight: at[r · kFewColumns + c].
struct Dots {
    int64_t row, rows, column, columns;
    const float* at;
};

constexpr int64_t kFewColumns = 12;       // of a weight, that a few rows of x are multiplied with at a time
constexpr int64_t kFewElements = 768;     // along K, that the nearest cache holds of them: whole blocks

// Numbers [k, k + count) of rows [n, n + columns) of a weight, unpacked or widened into `to` where they are not elements.
template <class T, class E>
WeightRows<E> part_of_rows(const LinearWeight& f, int64_t n, int64_t columns, int64_t k, int64_t count, int64_t K, E* to) {
    if constexpr (__is_same(T, E) || !__is_same(E, float)) {
        const int64_t row = K * (int64_t)sizeof(T) / (int64_t)sizeof(E);
        if (!f.type) return {(const E*)((const T*)f.weight + n * K + k), row, columns * row};
    }
    if constexpr (__is_same(E, float))
        for (int64_t c = 0; c < columns; ++c) {
            if (f.type) unpack_run(f, n + c, k, count, to + c * kFewElements);
            else widen<T>((const T*)f.weight + (n + c) * K + k, count, 1, count, to + c * kFewElements);
        }
    return {to, kFewElements, 0};
}

// done(dots) for rows of x [rows, K] and a few columns of [first, last) after others: a weight is read once.
template <class T, class E, class Done>
void over_tiles(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, Done&& done) {
    constexpr int64_t per_element = sizeof(E) / (__is_same(E, float) ? sizeof(float) : sizeof(T)), most = kFewElements * per_element;
    alignas(64) E panel[kFewColumns * kFewElements];
    Vec sums[kSums * kMaxStepRows * kFewColumns];
    float dots[kMaxStepRows * kFewColumns];
    const TilesOfRows tiles(rows);
    for (int64_t n = first, columns; n < last; n += columns) {
        columns = last - n < kFewColumns ? last - n : kFewColumns;
        for (int64_t k = 0, count; k < K; k += count) {
            count = K - k < most ? K - k : most;
            const WeightRows<E> w = part_of_rows<T>(f, n, columns, k, count, K, panel);
            const Part part{count / (W * per_element), count % (W * per_element), !k, k + count == K};
            Vec* held = sums;
            for (int64_t t = 0, row = 0; t < tiles.count; ++t) {
                const int64_t next = tiles.start(t + 1);
                with_constant<kDotRows>(next - row, [&](auto r) {
                    held = dot_tiles<r>(RowsInPlace<E>{x + row * K + k, K}, w, columns, part, held, dots + row * kFewColumns, kFewColumns);
                });
                row = next;
            }
        }
        done(Dots{0, rows, n, columns, dots});
    }
}

// done(dots) until every row of x [rows, K] has met every column of [first, last). What a weight consists of is asked
// once: asked for every row, it made a head of 49,152 rows a fifth slower.
template <class T, class Done>
inline void over_rows(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, Done&& done) {
    if (f.int8_activations) {
        const int64_t most = kLaneNumbers / K / 8 * 8;
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m < most ? rows - m : most;
            const float* from = x + m * K;
            auto few = [&](auto count) {
                over_rows_int8<count>(from, K, f, first, last, kFewColumns, [&](int64_t n, int64_t columns, const float* found) { done(Dots{m, count, n, columns, found}); });
            };
            if (some == 1) few(std::integral_constant<int, 1>{});
            else if (some == 2) few(std::integral_constant<int, 2>{});
            else over_lanes_int8(from, some, K, f, first, last, kFewColumns, [&](int64_t row, int64_t of, int64_t n, int64_t columns, const float* found) {
                done(Dots{m + row, of, n, columns, found});
            });
        }
        return;
    }
    if (f.type && rows == 1)
        return over_blocks_of_rows(x, K, f, first, last, [&](int64_t n, int64_t count, const float* found) { done(Dots{0, 1, n, count, found}); });
    constexpr bool pairs = PH_PAIRS && __is_same(T, BFloat16);
    const bool in_pairs = pairs && !f.type;
    if (f.type || (rows > 1 && !(in_pairs && K % (2 * W)))) {
        if constexpr (pairs)
            if (in_pairs) return over_tiles<T, Pair>(x, rows, K, f, first, last, done);
        return over_tiles<T, float>(x, rows, K, f, first, last, done);
    }
    for (int64_t m = 0; m < rows; ++m, x += K) {
        const T* w = (const T*)f.weight + first * K;
        for (int64_t n = first; n < last; ++n, w += K) {
            float found;
            dot_rows<1>(x, K, w, K, &found);
            done(Dots{m, 1, n, 1, &found});
        }
    }
}

// y[m, n] for n in [first, last) of one weight.
template <class T, class Y>
void gemv_rows(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last,
                 Y* y, int64_t y_stride) {
    const T* bias = (const T*)f.bias;
    over_rows<T>(x, rows, K, f, first, last, [&](const Dots& d) {
        for (int64_t r = 0; r < d.rows; ++r) {
            const float* at = d.at + r * kFewColumns;
            Y* to = y + (d.row + r) * y_stride + d.column;
            if (bias) for (int64_t c = 0; c < d.columns; ++c) round_to(at[c] + to_float(bias[d.column + c]), to + c);
            else for (int64_t c = 0; c < d.columns; ++c) round_to(at[c] + 0.0f, to + c);
        }
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
