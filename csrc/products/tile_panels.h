// Products of many rows in any order on matrix tiles: rows of x lie as their left factor takes them, and columns of Wᵀ
// are transposed into a panel that the second cache holds while all rows of x meet it. Both are sums of bfloat16 (parts.h).
#pragma once

#include "../common/parts.h"
#include "../quantized/products.h"
#include "tiles.h"

#if PH_TILES
namespace polyhead::PH_NAMESPACE {

// An element of rows that are multiplied so: a pair of a part of numbers E, which hold those of x and of the weight.
template <class E> struct Tiled { Pair pair; };
template <class E> constexpr bool kInAnyOrder<Tiled<E>> = true;

constexpr int64_t kTilePanel = 288;   // columns that are multiplied with one tile of rows after another
constexpr int64_t kGroup = 2 * kTile; // of them that registers hold
// Pairs along K of a panel, whole blocks; and of them that are multiplied at a time, whose tile of x the nearest cache
// holds. In float32 sums of these are added to others, which keeps the rounding of long ones small.
template <class E> constexpr int64_t kTilePart = kParts<E> == 1 ? 256 : 128;
template <class E> constexpr int64_t kTileRun = kParts<E> == 1 ? 128 : 64;
constexpr int64_t kRunOfBlocks = 128;  // pairs of a row of blocks that are unpacked at a time
static_assert(kTilePanel <= kMostColumns && kTilePart<float> % kRunOfBlocks == 0 && kParts<float> * kTilePart<float> * 5 / 4 <= kMostTilePairs);

inline int64_t pairs_of_row(int64_t K) { return (K + 2 * W - 1) / (2 * W) * W; }
template <> inline int64_t elements_of<Tiled<float>>(int64_t K) { return kParts<float> * pairs_of_row(K); }
template <> inline int64_t elements_of<Tiled<Half>>(int64_t K) { return kParts<Half> * pairs_of_row(K); }
template <> inline int64_t elements_of<Tiled<BFloat16>>(int64_t K) { return kParts<BFloat16> * pairs_of_row(K); }

// The parts of 2 W numbers, of which `rest` are there.
template <class E, class X> inline void parts_at(const X* x, int64_t rest, Vec* pairs) {
    X some[2 * W] = {};
    if (rest < 2 * W) {
        if (rest > 0) __builtin_memcpy(some, x, rest * sizeof(X));
        x = some;
    }
    if constexpr (__is_same(X, E)) pairs_in_parts(x, pairs);
    else pairs_in_parts<kParts<E>>(load(x), load(x + W), pairs);
}

template <int Parts> inline void store_parts(const Vec* pairs, Pair* to, int64_t part) {
    PH_UNROLL(3) for (int i = 0; i < Parts; ++i) store_any(to + i * part, pairs[i]);
}

// A tile of rows of x: [parts, pairs / 16, rows, 16].
template <class X, class E> void pack_tile(const X* x, int64_t stride, int64_t rows, int64_t K, Tiled<E>* to, int64_t part) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; 2 * k < K; k += W) {
            Vec pairs[kParts<E>];
            parts_at<E>(x + r * stride + 2 * k, K - 2 * k, pairs);
            store_parts<kParts<E>>(pairs, (Pair*)to + k * rows + r * W, part);
        }
}
template <class T, class E> void pack_tile(const T* x, int64_t stride, int64_t rows, int64_t K, Tiled<E>* to) {
    pack_tile(x, stride, rows, K, to, pairs_of_row(K) * rows);
}

// Pairs of 16 columns of [K, columns]: those of rows 2 k and 2 k + 1.
template <class E, class T> inline void pairs_of_columns(const T* x, int64_t k, int64_t K, int64_t stride, int64_t columns, Vec* pairs) {
    auto row = [&](int64_t k) { return k < K ? load_some(x + k * stride, columns) : Vec{}; };
    pairs_of_rows<E>(row(2 * k), row(2 * k + 1), pairs);
}

// The same of x [K, rows], whose rows are `stride` apart.
template <class T, class E> void pack_transposed(const T* x, int64_t stride, int64_t rows, int64_t K, Tiled<E>* to) {
    constexpr int parts = kParts<E>;
    for (int64_t r = 0; r < rows; r += W)
        for (int64_t k = 0; 2 * k < K; k += W) {
            Vec block[parts][W];
            for (int64_t i = 0; i < W; ++i) {
                Vec pairs[parts];
                pairs_of_columns<E>(x + r, k + i, K, stride, rows - r, pairs);
                PH_UNROLL(3) for (int part = 0; part < parts; ++part) block[part][i] = pairs[part];
            }
            PH_UNROLL(3) for (int part = 0; part < parts; ++part) {
                transpose_in_registers(block[part]);
                Pair* at = (Pair*)to + (part * pairs_of_row(K) + k) * rows + r * W;
                for (int64_t i = 0; i < W && r + i < rows; ++i) store_any(at + i * W, block[part][i]);
            }
        }
}

// 16 pairs of 16 rows, of which `columns` are there, and of each `rest` numbers: [parts, pairs, 32], parts `part` apart.
template <class E, class X> inline void transpose_pairs(const X* rows, int64_t stride, int64_t columns, int64_t rest, Pair* to, int64_t part) {
    constexpr int parts = kParts<E>;
    if constexpr (parts == 1) {
        Vec block[W];
        for (int64_t i = 0; i < W; ++i) {
            block[i] = Vec{};
            if (i < columns) parts_at<E>(rows + i * stride, rest, block + i);
        }
        transpose_in_registers(block);
        PH_UNROLL(16) for (int i = 0; i < W; ++i) store_any(to + i * kGroup, block[i]);
    } else {  // as numbers, which are fewer than their parts
        for (int64_t k = 0; k < 2 * W; k += W, to += W / 2 * kGroup) {
            Vec block[W];
            for (int64_t i = 0; i < W; ++i) block[i] = i < columns && k < rest ? load_some(rows + i * stride + k, rest - k) : Vec{};
            transpose_in_registers(block);
            PH_UNROLL(8) for (int i = 0; i < W; i += 2) {
                Vec pairs[parts];
                pairs_of_rows<E>(block[i], block[i + 1], pairs);
                store_parts<parts>(pairs, to + i / 2 * kGroup, part);
            }
        }
    }
}

// Pairs [from, from + pairs) of the rows [n, n + count) of a weight: [parts, pairs, 32] for every 32 of them.
template <class T, class E>
void tile_panel(const LinearWeight& f, int64_t n, int64_t count, int64_t K, int64_t from, int64_t pairs, Tiled<E>* panel) {
    constexpr int parts = kParts<E>;
    const int64_t part = pairs * kGroup;
    for (int64_t c = 0; c < count; c += W) {
        Pair* to = (Pair*)panel + c / kGroup * parts * part + c % kGroup;
        const int64_t columns = count - c < W ? count - c : W;
        if (f.transposed) {
            for (int64_t k = 0; k < pairs; ++k) {
                Vec found[parts];
                pairs_of_columns<E>((const T*)f.weight + n + c, from + k, K, f.out_features, columns, found);
                store_parts<parts>(found, to + k * kGroup, part);
            }
        } else if (f.type) {
            float numbers[W * 2 * kRunOfBlocks];
            for (int64_t k = 0; k < pairs; k += kRunOfBlocks) {
                const int64_t some = pairs - k < kRunOfBlocks ? pairs - k : kRunOfBlocks, first = 2 * (from + k);
                const int64_t rest = K - first < 2 * some ? K - first : 2 * some;
                for (int64_t i = 0; i < columns; ++i) unpack_run(f, n + c + i, first, rest, numbers + i * 2 * kRunOfBlocks);
                for (int64_t i = 0; i < some; i += W)
                    transpose_pairs<E>(numbers + 2 * i, 2 * kRunOfBlocks, columns, rest - 2 * i, to + (k + i) * kGroup, part);
            }
        } else {
            // Rows lie apart, so that no processor reads ahead by itself.
            const char* next = (const char*)((const T*)f.weight + (n + c + W) * K + 2 * from);
            for (int64_t i = 0; c + W + i < count && i < W; ++i)
                for (int64_t at = 0; at < 2 * pairs * (int64_t)sizeof(T); at += 64) __builtin_prefetch(next + i * K * (int64_t)sizeof(T) + at, 0, 2);
            for (int64_t k = 0; k < pairs; k += W)
                transpose_pairs<E>((const T*)f.weight + (n + c) * K + 2 * (from + k), K, columns, K - 2 * (from + k), to + k * kGroup, part);
        }
    }
}

// c[rows, N · 16] = or += a · b of packed tiles of `pairs`, whose parts are `a_part` and `b_part` apart.
template <int R, int N, int Parts>
inline void product_of_parts(int64_t rows, const Pair* a, int64_t a_part, const Pair* b, int64_t b_part, int64_t pairs, float* c, bool add) {
    constexpr bool apart = Parts == 3;  // as in prefill_tiles.h
    alignas(64) float sums[apart ? kGroup * kGroup : 1];
    begin_sums<R, N>(c, kTilePanel, add && !apart);
    for (int64_t k = 0; k < pairs; k += kTile)
        over_part_products<Parts>([&](auto of) {
            multiply_tiles<R, N, of.new_left, of.new_right>(a + of.left * a_part + k * rows, kTile,
                                                            b + of.right * b_part + k * kGroup, kGroup);
        });
    if (!add || !apart) return store_sums<R, N>(c, kTilePanel);
    store_sums<R, N>(sums, kGroup);
    for (int64_t r = 0; r < rows; ++r)
        PH_UNROLL(2) for (int n = 0; n < N * W; n += W) {
            float* to = c + r * kTilePanel + n;
            store_any(to, load(to) + load(sums + r * kGroup + n));
        }
}

// sums[rows, count], kTilePanel apart: a packed tile of x, whose parts are `part` apart, with a panel; added to what is
// there, if so.
template <class E>
void multiply_panel(int64_t rows, const Tiled<E>* x, int64_t part, const Tiled<E>* panel, int64_t count, int64_t pairs, float* sums, bool add) {
    constexpr int parts = kParts<E>;
    set_tile_rows(rows);
    int64_t k = 0, run;
    do {
        run = pairs - k > kTileRun<E> * 3 / 2 ? kTileRun<E> : pairs - k;
        for (int64_t n = 0; n < count; n += kGroup)
            with_constant<2>(rows > kTile ? 2 : 1, [&](auto r) {
                with_constant<2>(count - n > kTile ? 2 : 1, [&](auto c) {
                    product_of_parts<r, c, parts>(rows, (const Pair*)x + k * rows, part, (const Pair*)panel + n * parts * pairs + k * kGroup,
                                                  pairs * kGroup, run, sums + n, add);
                });
            });
        add = true;
    } while ((k += run) < pairs);
}

}  // namespace polyhead::PH_NAMESPACE
#endif
