// GEMM: y = x Wᵀ + b for many rows of x, each with the bits that GEMV gives it.
//
// A tile of rows and columns is multiplied at a time, its accumulators in registers: vectors of sums along K
// as dot_rows has them, so every number of y is added up in the same order. Loads are fewer than products in
// such a tile. Rows of x are widened and packed tile by tile, once for all threads; rows of W that are not
// float32 are widened or unpacked in panels, once for all rows of x.
//
// With pairs of bfloat16 (E is Pair) the processor's own instruction multiplies, twice as fast, in GEMV and GEMM in one
// order. Only blocks in a GEMM of pairs are rounded to bfloat16, and give other bits than in GEMV.
#pragma once

#include "../common/team.h"
#include "rows.h"
#include "../quantized/products.h"

namespace polyhead::PH_NAMESPACE {

constexpr int kDotRows = PH_WIDTH == 16 ? 6 : 4;
constexpr int kDotColumns = PH_WIDTH == 16 ? 4 : 3;

// Sums across lanes of N vectors, as `sum` adds them: the one of vector i stands in lane i · W / N.
template <int N, int H> inline Vec folded(const Vec* v) {
    if constexpr (H == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        const Vec next = added_halves<H>(v[0], v[0]);
        return folded<1, H / 2>(&next);
    } else {
        Vec next[N / 2];
        PH_UNROLL(8) for (int i = 0; i < N / 2; ++i) next[i] = added_halves<H>(v[i], v[i + N / 2]);
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

constexpr int64_t kPanel = 96;         // columns that are multiplied with one tile of rows after another
constexpr int64_t kColumnUnit = 12;    // threads share columns in whole tiles
constexpr int64_t kDotRun = PH_WIDTH == 16 ? 128 : 96;  // vectors along K that the nearest caches hold of a tile
static_assert(kPanel <= kMostPanel && kDotRows <= kMostTileRows && W <= kMostWidth);

// Rows of W: elements of row n from at + n · row on.
template <class E> struct WeightRows {
    const E* at;
    int64_t row;
};

// Elements of a row of K numbers: pairs fill whole vectors, with zeros.
template <class E> inline int64_t elements_of(int64_t K) {
    return __is_same(E, float) ? K : (K + 2 * W - 1) / (2 * W) * W;
}
inline int64_t whole_vectors(int64_t elements) { return (elements + W - 1) / W * W; }

// Vectors [from, to) along K of R packed rows of x and C columns, added to what `sums` holds of those before:
// [kSums, R, C]. The last ones give the dots, with the K % W numbers that fill no vector.
template <int R, int C, class E>
inline void dot_tile(const E* x, WeightRows<E> w, int64_t K, int64_t from, int64_t to, Vec* sums, float* dots) {
    const bool last = to == K / W;
    Vec total[R * C];
    PH_UNROLL(2) for (int s = 0; s < kSums; ++s) {
        Vec acc[R][C], *held = sums + s * R * C;
        PH_UNROLL(8) for (int r = 0; r < R; ++r)
            PH_UNROLL(8) for (int c = 0; c < C; ++c) acc[r][c] = from ? held[r * C + c] : Vec{};
        const int64_t start = from + s < to ? from + s : from;  // of no numbers there may be no memory
        const E* a = x + start * (R * W);
        const E* b = w.at + start * W;
        for (int64_t v = from + s; v < to; v += kSums, a += kSums * R * W, b += kSums * W) {
            Vec column[C];
            PH_UNROLL(8) for (int c = 0; c < C; ++c) column[c] = load_elements(b + c * w.row);
            PH_UNROLL(8) for (int r = 0; r < R; ++r) {
                const Vec row = load_elements(a + r * W);
                PH_UNROLL(8) for (int c = 0; c < C; ++c) acc[r][c] = multiply_add_of<E>(acc[r][c], column[c], row);
            }
        }
        PH_UNROLL(8) for (int r = 0; r < R; ++r)
            PH_UNROLL(8) for (int c = 0; c < C; ++c) {
                const int i = r * C + c;
                if (last) total[i] = s ? total[i] + acc[r][c] : acc[r][c];
                else held[i] = acc[r][c];
            }
    }
    if (!last) return;
    float found[R * C];
    sums_of<R * C>(total, found);
    if constexpr (__is_same(E, float))
        for (int64_t k = K / W * W; k < K; ++k)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    found[r * C + c] = multiply_add(found[r * C + c], w.at[c * w.row + k], x[K / W * W * R + r * W + k % W]);
    for (int r = 0; r < R; ++r) __builtin_memcpy(dots + r * kPanel, found + r * C, C * sizeof(float));
}

// Columns that R rows are multiplied with at a time, so that registers hold the tile.
template <int R> constexpr int kTileColumns = PH_WIDTH == 16 ? (R > 4 ? 4 : 6) : R > 3 ? 3 : 4;

// dots[R, kPanel] of R packed rows with `count` rows of W.
template <int R, class E> void dot_panel(const E* x, WeightRows<E> w, int64_t count, int64_t K, Vec* scratch, float* dots) {
    constexpr int C = kTileColumns<R>;
    const int64_t vectors = K / W;
    int64_t from = 0;
    do {
        const int64_t to = vectors - from > kDotRun * 5 / 4 ? from + kDotRun : vectors;
        Vec* sums = scratch;
        auto tile = [&](int64_t n, auto columns) {
            constexpr int c = columns;
            const WeightRows<E> here{w.at + n * w.row, w.row};
            dot_tile<R, c>(x, here, K, from, to, sums, dots + n);
            if (to < vectors || from) sums += kSums * R * c;
        };
        int64_t n = 0;
        for (; n + C <= count; n += C) tile(n, std::integral_constant<int, C>{});
        for (; n < count; ++n) tile(n, std::integral_constant<int, 1>{});
        from = to;
    } while (from < vectors);
}

// For the rows that tiles of more than kMaxGemvRows rows have.
template <class E>
inline void dots_of_tile(int64_t rows, const E* x, WeightRows<E> w, int64_t count, int64_t K, Vec* scratch, float* dots) {
    if constexpr (kDotRows == 6) {
        if (rows == 6) return dot_panel<6>(x, w, count, K, scratch, dots);
        if (rows == 5) return dot_panel<5>(x, w, count, K, scratch, dots);
    }
    if (rows == 4) return dot_panel<4>(x, w, count, K, scratch, dots);
    if constexpr (kDotRows == 4) dot_panel<3>(x, w, count, K, scratch, dots);
}

// Rows 9 and more in tiles of nearly as many: row of x that tile i begins with.
struct TilesOfRows {
    int64_t rows, count;
    explicit TilesOfRows(int64_t rows) : rows(rows), count((rows + kDotRows - 1) / kDotRows) {}
    int64_t start(int64_t i) const { return rows / count * i + (i < rows % count ? i : rows % count); }
};

template <class X> void pack_tile(const X* x, int64_t stride, int64_t rows, int64_t K, float* to) {
    const int64_t whole = K / W * W;
    for (int64_t r = 0; r < rows; ++r) {
        const X* from = x + r * stride;
        for (int64_t k = 0; k < whole; k += W) store(load(from + k), to + k * rows + r * W);
        for (int64_t k = whole; k < K; ++k) to[whole * rows + r * W + k % W] = to_float(from[k]);
    }
}

// Rows [n, n + count) of a weight as float32, widened or unpacked into `panel` where they are none.
template <class T> WeightRows<float> weight_rows(const LinearWeight& f, int64_t n, int64_t count, int64_t K, float* panel) {
    if constexpr (__is_same(T, float))
        if (!f.type) return {(const float*)f.weight + n * K, K};
    const int64_t row = panel_row(K);
    for (int64_t i = 0; i < count; ++i) {
        float* to = panel + i * row;
        if (f.type) unpack_run(f, n + i, 0, K, to);
        else widen<T>((const T*)f.weight + (n + i) * K, K, 1, K, to);
    }
    return {panel, row};
}

#if PH_PAIRS
inline void pack_tile(const BFloat16* x, int64_t stride, int64_t rows, int64_t K, Pair* to) {
    const int64_t whole = K / (2 * W) * (2 * W);
    for (int64_t r = 0; r < rows; ++r) {
        const BFloat16* from = x + r * stride;
        for (int64_t k = 0; k < whole; k += 2 * W) store_any(to + k / 2 * rows + r * W, load_any<Vec>(from + k));
        if (whole == K) continue;
        Vec rest{};
        __builtin_memcpy(&rest, from + whole, (K - whole) * sizeof *from);
        store_any(to + whole / 2 * rows + r * W, rest);
    }
}

// The same as pairs. Rows that fill no whole vectors are copied, with zeros behind them.
template <class T> WeightRows<Pair> weight_rows(const LinearWeight& f, int64_t n, int64_t count, int64_t K, Pair* panel) {
    static_assert(__is_same(T, BFloat16));
    if (!f.type && K % (2 * W) == 0) return {(const Pair*)((const T*)f.weight + n * K), K / 2};
    const int64_t row = elements_of<Pair>(K) + W;
    float run[kRun];
    for (int64_t i = 0; i < count; ++i) {
        BFloat16* to = (BFloat16*)(panel + i * row);
        __builtin_memset(to + K / (2 * W) * (2 * W), 0, 2 * W * sizeof *to);
        if (!f.type) __builtin_memcpy(to, (const T*)f.weight + (n + i) * K, K * sizeof *to);
        for (int64_t from = 0; f.type && from < K; from += kRun) {
            const int64_t some = K - from < kRun ? K - from : kRun;
            unpack_run(f, n + i, from, some, run);
            pack_weights(run, some, (Pair*)(to + from));
        }
    }
    return {panel, row};
}
#endif

// What a thread of a team computes: tiles of rows and columns, both in whole ones.
struct Share {
    int64_t first_tile, last_tile, first_column, last_column;
    Share(int64_t tiles, int64_t columns, int64_t unit, int64_t thread, int64_t threads) {
        const int64_t units = columns ? (columns + unit - 1) / unit : 1;
        int64_t across = 1, down = 1, least = INT64_MAX;
        for (int64_t d = 1; d <= threads && d <= tiles; ++d) {
            const int64_t a = threads / d < units ? threads / d : units;
            const int64_t most = ((units + a - 1) / a) * ((tiles + d - 1) / d);
            if (most < least) least = most, across = a, down = d;
        }
        const int64_t i = thread % across, j = thread / across;
        if (j >= down) first_tile = last_tile = 0;
        else first_tile = tiles * j / down, last_tile = tiles * (j + 1) / down;
        first_column = units * i / across * unit;
        last_column = units * (i + 1) / across * unit;
        if (last_column > columns) last_column = columns;
    }
};

// Calls step(first row, tiles of rows) for one block of rows after another, all threads at the same one.
template <class Step> inline void for_blocks(int64_t rows, const Step& step) {
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    for (int64_t b = 0; b < blocks; ++b) {
        if (b) wait_for_team();
        const int64_t block = rows * b / blocks;
        step(block, TilesOfRows(rows * (b + 1) / blocks - block));
    }
}

// The tiles of a block of x that a thread packs.
template <class T, class E>
void pack_block(const Gemm& p, int64_t block, TilesOfRows tiles, int64_t thread, int64_t threads, E* to) {
    const int64_t width = whole_vectors(elements_of<E>(p.in_features));
    for (int64_t i = tiles.count * thread / threads; i < tiles.count * (thread + 1) / threads; ++i) {
        const int64_t row = tiles.start(i);
        pack_tile((const T*)p.x + (block + row) * p.x_stride, p.x_stride, tiles.start(i + 1) - row, p.in_features, to + row * width);
    }
}

// y[r, n] = dots + bias for R rows and `count` columns.
template <class T, class Y>
void write_dots(const float* dots, int64_t rows, const T* bias, int64_t count, Y* y, int64_t stride) {
    float added[kPanel] = {};
    for (int64_t n = 0; bias && n < count; ++n) added[n] = to_float(bias[n]);
    for (int64_t r = 0; r < rows; ++r, dots += kPanel, y += stride)
        for (int64_t n = 0; n < count; n += W) store_some(load(dots + n) + load(added + n), y + n, count - n);
}

// Calls done(first row, rows, n, columns, dots) for the tiles of a thread and every panel [n, n + columns) of the rows
// [first, last) of a weight; x is packed.
template <class T, class E, class Done>
void over_panels(const E* x, int64_t K, const LinearWeight& f, int64_t first, int64_t last, TilesOfRows tiles, const Share& share,
                 const GemmScratch& scratch, int thread, const Done& done) {
    const int64_t elements = elements_of<E>(K), width = whole_vectors(elements);
    for (int64_t n = first, count; n < last && share.first_tile < share.last_tile; n += count) {
        count = last - n < kPanel ? last - n : kPanel;
        const WeightRows<E> w = weight_rows<T>(f, n, count, K, (E*)scratch.panel(thread));
        float dots[kDotRows * kPanel];
        for (int64_t t = share.first_tile; t < share.last_tile; ++t) {
            const int64_t row = tiles.start(t), rows = tiles.start(t + 1) - row;
            dots_of_tile(rows, x + row * width, w, count, elements, (Vec*)scratch.sums(thread), dots);
            done(row, rows, n, count, dots);
        }
    }
}

template <class T, class E> void gemm_of(const Gemm& p, int thread, int threads) {
    int64_t columns = 0;
    for (int i = 0; i < p.count; ++i) columns += p.weights[i].out_features;
    for_blocks(p.rows, [&](int64_t block, TilesOfRows tiles) {
        pack_block<T>(p, block, tiles, thread, threads, (E*)p.scratch.x());
        wait_for_team();
        const Share share(tiles.count, columns, kColumnUnit, thread, threads);
        int64_t column = 0;
        for (int i = 0; i < p.count; column += p.weights[i++].out_features) {
            const LinearWeight& f = p.weights[i];
            const int64_t first = share.first_column > column ? share.first_column - column : 0;
            const int64_t last = share.last_column - column < f.out_features ? share.last_column - column : f.out_features;
            over_panels<T>((const E*)p.scratch.x(), p.in_features, f, first, last, tiles, share, p.scratch, thread,
                           [&](int64_t row, int64_t rows, int64_t n, int64_t count, const float* dots) {
                write_dots(dots, rows, f.bias ? (const T*)f.bias + n : nullptr, count,
                           (T*)p.y + (block + row) * p.y_stride + column + n, p.y_stride);
            });
        }
    });
}

// Calls of(number of the dtype, element of packed rows).
template <class Of> void with_elements(const Gemm& p, const Of& of) {
#if PH_PAIRS
    if (p.dtype == kBFloat16 && p.pairs) return of(BFloat16{}, Pair{});
#endif
    with_dtype(p.dtype, [&](auto number) { of(number, float{}); });
}

inline void gemm(const Gemm& p, int threads) {
    in_team(threads, [&](int thread, int team) {
        with_elements(p, [&](auto number, auto element) {
            gemm_of<decltype(number), decltype(element)>(p, thread, team);
        });
    });
}

}  // namespace polyhead::PH_NAMESPACE
