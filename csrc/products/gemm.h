// GEMM: y = x Wᵀ + b for many rows of x, each with the bits that GEMV gives it.
//
// A tile of rows and columns is multiplied at a time, its accumulators in registers: vectors of sums along K
// as dot_rows has them, so every number of y is added up in the same order. Loads are fewer than products in
// such a tile. Rows of x are widened and packed tile by tile, once for all threads; rows of W that are not
// float32 are widened or unpacked in panels, once for all rows of x.
//
// With pairs of bfloat16 (E is Pair) the processor's own instruction multiplies, twice as fast, in GEMV and GEMM in one
// order. Only blocks in a GEMM of pairs are rounded to bfloat16, and give other bits than in GEMV.
//
// Where the order of sums is free, outer products are faster (E is Outer, outer_products.h), and matrix tiles (E is Tiled,
// tile_panels.h).
#pragma once

#include "../common/team.h"
#include "../quantized/int8_gemm.h"
#include "outer_products.h"
#include "rows.h"
#include "tile_panels.h"

namespace polyhead::PH_NAMESPACE {

template <class E> constexpr int64_t kPanel = 96;  // columns that are multiplied with one tile of rows after another
template <class E> constexpr int64_t kColumnUnit = 12;  // threads share columns in whole tiles
template <class E> constexpr int64_t kHiddenUnit = kPanel<E>;  // and hidden features likewise
template <class E> constexpr int64_t kRowsOfTile = kDotRows;
constexpr int64_t kDotRun = PH_WIDTH == 16 ? 128 : 96;  // vectors along K that the nearest caches hold of a tile
static_assert(kPanel<float> <= kMostPanel && kPanel<float> % kOuterColumns == 0);

template <class E> constexpr int64_t kColumnUnit<Outer<E>> = kOuterColumns;
template <class E> constexpr int64_t kRowsOfTile<Outer<E>> = kOuterRows;
#if PH_TILES
template <class T> constexpr int64_t kPanel<Tiled<T>> = kTilePanel;
template <class T> constexpr int64_t kColumnUnit<Tiled<T>> = kTwoTiles;
template <class T> constexpr int64_t kHiddenUnit<Tiled<T>> = kTwoTiles;
template <class T> constexpr int64_t kRowsOfTile<Tiled<T>> = kTwoTiles;
#endif

// dots[R, kPanel<E>] of R packed rows with `count` rows of W, of K elements each.
template <int R, class E> void dot_panel(const E* x, WeightRows<E> w, int64_t count, int64_t K, Vec* scratch, float* dots) {
    const int64_t vectors = K / W;
    int64_t from = 0;
    do {
        const int64_t to = vectors - from > kDotRun * 5 / 4 ? from + kDotRun : vectors;
        const Part part{to - from, K % W, !from, to == vectors};
        dot_tiles<R>(PackedRows<R, E>{x}.from(from), w.from(0, from * W), count, part, scratch, dots, kPanel<E>);
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
        if (!f.type) return {(const float*)f.weight + n * K, K, 0};
    const int64_t row = panel_row(K);
    for (int64_t i = 0; i < count; ++i) {
        float* to = panel + i * row;
        if (f.type) unpack_run(f, n + i, 0, K, to);
        else widen<T>((const T*)f.weight + (n + i) * K, K, 1, K, to);
    }
    return {panel, row, 0};
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
    if (!f.type && K % (2 * W) == 0) return {(const Pair*)((const T*)f.weight + n * K), K / 2, 0};
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
    return {panel, row, 0};
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

// The tiles of a block of x that a thread packs.
template <class T, class E>
void pack_block(const Gemm& p, int64_t block, TilesOfRows tiles, int64_t thread, int64_t threads, E* to) {
    const int64_t width = whole_vectors(elements_of<E>(p.in_features));
    for (int64_t i = tiles.count * thread / threads; i < tiles.count * (thread + 1) / threads; ++i) {
        const int64_t row = tiles.start(i);
        if constexpr (kInAnyOrder<E>)
            if (p.x_transposed) {
                pack_transposed((const T*)p.x + block + row, p.x_stride, tiles.start(i + 1) - row, p.in_features, to + row * width);
                continue;
            }
        pack_tile((const T*)p.x + (block + row) * p.x_stride, p.x_stride, tiles.start(i + 1) - row, p.in_features, to + row * width);
    }
}

// y[r, n] = dots + bias for R rows and `count` columns, added to what is there, if so.
template <class E, class T, class Y>
void write_dots(const float* dots, int64_t rows, const T* bias, int64_t count, bool add, Y* y, int64_t stride) {
    float added[kPanel<E>] = {};
    for (int64_t n = 0; bias && n < count; ++n) added[n] = to_float(bias[n]);
    for (int64_t r = 0; r < rows; ++r, dots += kPanel<E>, y += stride)
        for (int64_t n = 0; n < count; n += W) {
            const Vec sum = load(dots + n) + load(added + n);
            store_some(add ? load_some(y + n, count - n) + sum : sum, y + n, count - n);
        }
}

// Calls done(first row, rows, n, columns, dots [rows, kPanel<E>]) for the tiles of a thread and every panel [n, n + columns) of the rows
// [first, last) of a weight; x is packed.
template <class T, class E, class Done>
std::enable_if_t<!kInAnyOrder<E>>
over_panels(const E* x, int64_t K, const LinearWeight& f, int64_t first, int64_t last, TilesOfRows tiles, const Share& share,
            const GemmScratch& scratch, int thread, const Done& done) {
    const int64_t elements = elements_of<E>(K), width = whole_vectors(elements);
    for (int64_t n = first, count; n < last && share.first_tile < share.last_tile; n += count) {
        count = last - n < kPanel<E> ? last - n : kPanel<E>;
        const WeightRows<E> w = weight_rows<T>(f, n, count, K, (E*)scratch.panel(thread));
        float dots[kRowsOfTile<E> * kPanel<E>];
        for (int64_t t = share.first_tile; t < share.last_tile; ++t) {
            const int64_t row = tiles.start(t), rows = tiles.start(t + 1) - row;
            dots_of_tile(rows, x + row * width, w, count, elements, (Vec*)scratch.sums(thread), dots);
            done(row, rows, n, count, dots);
        }
    }
}

// The same in any order: sums of all tiles are kept from one part of K to the next.
template <class T, class E, class Done>
std::enable_if_t<kInAnyOrder<E>>
over_panels(const E* x, int64_t K, const LinearWeight& f, int64_t first, int64_t last, TilesOfRows tiles, const Share& share,
            const GemmScratch& scratch, int thread, const Done& done) {
    const int64_t width = whole_vectors(elements_of<E>(K)), steps = width / kSlicesOf<E>;
    E* panel = (E*)scratch.panel(thread);
    for (int64_t n = first, count; n < last && share.first_tile < share.last_tile; n += count) {
        count = last - n < kPanel<E> ? last - n : kPanel<E>;
        int64_t k = 0, part;
        do {
            part = steps - k > kPanelSteps<E> * 5 / 4 ? kPanelSteps<E> : steps - k;
            transpose_panel<T>(f, n, count, K, k, part, panel);
            alignas(64) float dots[kRowsOfTile<E> * kPanel<E>];
            for (int64_t t = share.first_tile; t < share.last_tile; ++t) {
                const int64_t row = tiles.start(t), rows = tiles.start(t + 1) - row;
                float* sums = part == steps ? dots : scratch.sums(thread) + row * kPanel<E>;
                multiply_panel(rows, x + row * width + k * rows, rows * steps, panel, count, part, sums, kPanel<E>, k > 0);
                if (k + part == steps) done(row, rows, n, count, sums);
            }
        } while ((k += part) < steps);
    }
}

template <class T, class E> void gemm_of(const Gemm& p, int thread, int threads) {
    int64_t columns = 0;
    for (int i = 0; i < p.count; ++i) columns += p.weights[i].out_features;
    over_row_blocks(p.rows, p.in_features, [&](int64_t block, int64_t rows_of_block) {
        const TilesOfRows tiles(rows_of_block, kRowsOfTile<E>);
        pack_block<T>(p, block, tiles, thread, threads, (E*)p.scratch.x());
        wait_for_team();
        const Share share(tiles.count, columns, kColumnUnit<E>, thread, threads);
        int64_t column = 0;
        for (int i = 0; i < p.count; column += p.weights[i++].out_features) {
            const LinearWeight& f = p.weights[i];
            const int64_t first = share.first_column > column ? share.first_column - column : 0;
            const int64_t last = share.last_column - column < f.out_features ? share.last_column - column : f.out_features;
            over_panels<T>((const E*)p.scratch.x(), p.in_features, f, first, last, tiles, share, p.scratch, thread,
                           [&](int64_t row, int64_t rows, int64_t n, int64_t count, const float* dots) {
                write_dots<E>(dots, rows, f.bias ? (const T*)f.bias + n : nullptr, count, p.add,
                           (T*)p.y + (block + row) * p.y_stride + column + n, p.y_stride);
            });
        }
    });
}

// Calls of(number of the dtype, element of packed rows). As many rows as a step has get the bits of GEMV in any case.
template <class Of> void with_elements(const Gemm& p, [[maybe_unused]] bool blocks, const Of& of) {
#if PH_TILES
    if (p.any_order && p.rows >= (p.dtype == kBFloat16 ? kTile : kMaxStepRows + 1)) {
        // The numbers of blocks have more bits than float16.
        if (p.dtype == kFloat16 && blocks) return of(Half{}, Tiled<float>{});
        return with_dtype(p.dtype, [&](auto number) { of(number, Tiled<decltype(number)>{}); });
    }
#else
    const bool outer = p.any_order && p.rows > kMaxStepRows;
#if PH_PAIRS
    if (p.dtype == kBFloat16 && p.pairs && outer) return of(BFloat16{}, Outer<Pair>{});
#endif
    if (outer) return with_dtype(p.dtype, [&](auto number) { of(number, Outer<float>{}); });
#endif
#if PH_PAIRS
    if (p.dtype == kBFloat16 && p.pairs) return of(BFloat16{}, Pair{});
#endif
    with_dtype(p.dtype, [&](auto number) { of(number, float{}); });
}

inline void gemm(const Gemm& p, int threads) {
    in_team(threads, [&](int thread, int team) {
        [[maybe_unused]] const TilesInUse tiles;
        if (p.weights[0].int8_activations) return with_dtype(p.dtype, [&](auto number) { int8_gemm_of<decltype(number)>(p, thread, team); });
        bool blocks = false;
        for (int i = 0; i < p.count; ++i) blocks |= p.weights[i].type != 0;
        with_elements(p, blocks, [&](auto number, auto element) {
            gemm_of<decltype(number), decltype(element)>(p, thread, team);
        });
    });
}

}  // namespace polyhead::PH_NAMESPACE
