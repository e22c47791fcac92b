// Tiles of rows and columns of a product, their accumulators in registers: vectors of sums along K as dot_rows
// has them, so that every number is added up in the same order, whatever stands beside it.
#pragma once

#include "../common/tile_products.h"
#include "arguments.h"
#include "dot.h"

namespace polyhead::PH_NAMESPACE {

constexpr int kDotRows = PH_WIDTH == 16 ? 6 : 4;
static_assert(kDotRows <= kMostTileRows && W <= kMostWidth);

// Sums across lanes of N vectors, as `sum` adds them: the one of vector i stands in lane i · W / N.
template <int N, int H> inline Vec folded(const Vec* v) {
    if constexpr (H == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        const Vec next = joined_halves<H>(v[0], v[0]);
        return folded<1, H / 2>(&next);
    } else {
        Vec next[N / 2];
        PH_UNROLL(8) for (int i = 0; i < N / 2; ++i) next[i] = joined_halves<H>(v[i], v[i + N / 2]);
        return folded<N / 2, H / 2>(next);
    }
}

constexpr int power_within(int count) {
    int found = 1;
    while (2 * found <= count && 2 * found <= W) found *= 2;
    return found;
}

// to[i] = sum(v[i]) for i < N.
template <int N> inline void sums_of(const Vec* v, float* to) {
    if constexpr (N > 0) {
        constexpr int n = power_within(N);
        const Vec found = folded<n, W / 2>(v);
        if constexpr (n == W) {
            store(found, to);
        } else {
            PH_UNROLL(16) for (int i = 0; i < n; ++i) to[i] = found[i * (W / n)];
        }
        sums_of<N - n>(v + n, to + n);
    }
}

// Elements of a row of K numbers: pairs fill whole vectors, with zeros.
template <class E> inline int64_t elements_of(int64_t K) {
    return __is_same(E, float) ? K : (K + 2 * W - 1) / (2 * W) * W;
}

template <class E> constexpr bool kInAnyOrder = false;  // not that of GEMV
// Of products in any order: elements along K of a panel, and the slices that rows lie in.
template <class E> constexpr int64_t kPanelSteps = 0;
template <class E> constexpr int kSlicesOf = 1;

// Rows of W: elements of row n from at + n · row on.
template <class E> struct WeightRows {
    const E* at;
    int64_t row;
    int64_t ahead;  // elements from these rows to those that are read next, if they come from memory
    WeightRows from(int64_t n, int64_t element) const { return {at + n * row + element, row, ahead}; }
};

// R rows of x side by side, a vector of each after the other.
template <int R, class E> struct PackedRows {
    const E* at;
    Vec vector(int r, int64_t v) const { return load_elements(at + (v * R + r) * W); }
    float number(int r, int64_t k) const { return at[k / W * W * R + r * W + k % W]; }
    PackedRows from(int64_t v) const { return {at + v * R * W}; }
};

// Rows of float32 where they lie; in pairs each number is rounded as it is read.
template <class E> struct RowsInPlace {
    const float* at;
    int64_t row;
    Vec vector(int r, int64_t v) const {
#if PH_PAIRS
        if constexpr (!__is_same(E, float)) return pairs_of(at + r * row + v * 2 * W);
#endif
        return load(at + r * row + v * W);
    }
    float number(int r, int64_t k) const { return at[r * row + k]; }
    RowsInPlace from(int64_t v) const { return {at + v * W * (__is_same(E, float) ? 1 : 2), row}; }
};

// A part of K: vectors, and numbers behind the last that fill none.
struct Part {
    int64_t vectors, rest;
    bool first, last;
};

// Dots of R rows of x with C of W, added to what `sums` holds of the parts before: [kSums, R, C]. dots[r · stride + c].
template <int R, int C, class E, class X>
inline void dot_tile(X x, WeightRows<E> w, Part part, Vec* sums, float* dots, int64_t stride) {
    Vec total[R * C];
    PH_UNROLL(2) for (int s = 0; s < kSums; ++s) {
        Vec acc[R][C], *held = sums + s * R * C;
        PH_UNROLL(8) for (int r = 0; r < R; ++r)
            PH_UNROLL(8) for (int c = 0; c < C; ++c) acc[r][c] = part.first ? Vec{} : held[r * C + c];
        for (int64_t v = s; v < part.vectors; v += kSums) {
            Vec column[C];
            const E* b = w.at + v * W;
            if (w.ahead) PH_UNROLL(8) for (int c = 0; c < C; ++c) __builtin_prefetch(b + c * w.row + w.ahead, 0, 1);
            PH_UNROLL(8) for (int c = 0; c < C; ++c) column[c] = load_elements(b + c * w.row);
            PH_UNROLL(8) for (int r = 0; r < R; ++r) {
                const Vec row = x.vector(r, v);
                PH_UNROLL(8) for (int c = 0; c < C; ++c) acc[r][c] = multiply_add_of<E>(acc[r][c], column[c], row);
            }
        }
        PH_UNROLL(8) for (int r = 0; r < R; ++r)
            PH_UNROLL(8) for (int c = 0; c < C; ++c) {
                const int i = r * C + c;
                if (part.last) total[i] = s ? total[i] + acc[r][c] : acc[r][c];
                else held[i] = acc[r][c];
            }
    }
    if (!part.last) return;
    float found[R * C];
    sums_of<R * C>(total, found);
    if constexpr (__is_same(E, float))
        for (int64_t k = part.vectors * W; k < part.vectors * W + part.rest; ++k)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    found[r * C + c] = multiply_add(found[r * C + c], w.at[c * w.row + k], x.number(r, k));
    for (int r = 0; r < R; ++r) __builtin_memcpy(dots + r * stride, found + r * C, C * sizeof(float));
}

// Columns that R rows are multiplied with at a time, so that registers hold the tile.
template <int R> constexpr int kTileColumns = PH_WIDTH == 16 ? (R > 4 ? 4 : 6) : R > 3 ? 3 : 4;

// Dots of R rows of x with `count` rows of W, a tile after the other. Returns the sums of the next tile.
template <int R, class E, class X>
Vec* dot_tiles(X x, WeightRows<E> w, int64_t count, Part part, Vec* sums, float* dots, int64_t stride) {
    constexpr int C = kTileColumns<R>;
    auto tile = [&](int64_t n, auto columns) {
        constexpr int c = columns;
        dot_tile<R, c>(x, w.from(n, 0), part, sums, dots + n, stride);
        if (!part.first || !part.last) sums += kSums * R * c;
    };
    int64_t n = 0;
    for (; n + C <= count; n += C) tile(n, std::integral_constant<int, C>{});
    for (; n < count; ++n) tile(n, std::integral_constant<int, 1>{});
    return sums;
}

// Rows in tiles of nearly as many: row of x that tile i begins with.
struct TilesOfRows {
    int64_t rows, count;
    explicit TilesOfRows(int64_t rows, int64_t most = kDotRows) : rows(rows), count((rows + most - 1) / most) {}
    int64_t start(int64_t i) const { return rows / count * i + (i < rows % count ? i : rows % count); }
};

}  // namespace polyhead::PH_NAMESPACE
