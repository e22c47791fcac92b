// Products of many rows in any order on matrix tiles: rows of x lie as their left factor takes them, and columns of Wᵀ
// are transposed into a panel that the second cache holds while all rows of x meet it. Both are sums of bfloat16
// (common/slices.h).
#pragma once

#include "../common/slices.h"
#include "../quantized/products.h"
#include "tiles.h"

#if PH_TILES
namespace polyhead::PH_NAMESPACE {

// An element of rows that are multiplied so: a pair of a slice of numbers E, which hold those of x and of the weight.
template <class E> struct Tiled { Pair pair; };
template <class E> constexpr bool kInAnyOrder<Tiled<E>> = true;
template <class E> constexpr int kSlicesOf<Tiled<E>> = kSlices<E>;

constexpr int64_t kTilePanel = 288;  // columns that are multiplied with one tile of rows after another
// Pairs along K of a panel, in whole blocks; and of them that are multiplied at a time, whose tile of x the nearest cache
// holds. In float32 sums of these are added to others, which keeps the rounding of long ones small.
template <class E> constexpr int64_t kPanelSteps<Tiled<E>> = kSlices<E> == 1 ? 256 : 128;
template <class E> constexpr int64_t kStepsAtOnce = kSlices<E> == 1 ? 128 : 64;
constexpr int64_t kBlockSteps = 128;  // pairs of a row of blocks that are unpacked at a time
static_assert(kTilePanel <= kMostColumns && kPanelSteps<Tiled<float>> % kBlockSteps == 0);
static_assert(kSlices<float> * kPanelSteps<Tiled<float>> * 5 / 4 <= kMostSlicedSteps && kSlices<float> <= kMostSlices);

inline int64_t pairs_of_row(int64_t K) { return elements_of<Pair>(K); }
template <> inline int64_t elements_of<Tiled<float>>(int64_t K) { return kSlices<float> * pairs_of_row(K); }
template <> inline int64_t elements_of<Tiled<Half>>(int64_t K) { return kSlices<Half> * pairs_of_row(K); }
template <> inline int64_t elements_of<Tiled<BFloat16>>(int64_t K) { return pairs_of_row(K); }

// The slices of 2 W numbers, of which `rest` are there.
template <class E, class X> inline void slices_at(const X* x, int64_t rest, Vec* pairs) {
    X some[2 * W] = {};
    if (rest < 2 * W) {
        if (rest > 0) __builtin_memcpy(some, x, rest * sizeof(X));
        x = some;
    }
    if constexpr (__is_same(X, E)) pairs_in_slices(x, pairs);
    else pairs_in_slices<kSlices<E>>(load(x), load(x + W), pairs);
}

// A tile of rows of x: [slices, pairs / 16, rows, 16], slices `slice` apart.
template <class X, class E> void pack_tile(const X* x, int64_t stride, int64_t rows, int64_t K, Tiled<E>* to, int64_t slice) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; 2 * k < K; k += W) {
            Vec pairs[kSlices<E>];
            slices_at<E>(x + r * stride + 2 * k, K - 2 * k, pairs);
            store_slices<kSlices<E>>(pairs, (Pair*)to + k * rows + r * W, slice);
        }
}
template <class T, class E> void pack_tile(const T* x, int64_t stride, int64_t rows, int64_t K, Tiled<E>* to) {
    pack_tile(x, stride, rows, K, to, pairs_of_row(K) * rows);
}

// Pairs of 16 columns of [K, columns]: those of rows 2 k and 2 k + 1.
template <class E, class T> inline void pairs_of_columns(const T* x, int64_t k, int64_t K, int64_t stride, int64_t columns, Vec* pairs) {
    auto row = [&](int64_t k) { return k < K ? load_some(x + k * stride, columns) : Vec{}; };
    pairs_of_two_rows<kSlices<E>>(row(2 * k), row(2 * k + 1), pairs);
}

// The same of x [K, rows], whose rows are `stride` apart.
template <class T, class E> void pack_transposed(const T* x, int64_t stride, int64_t rows, int64_t K, Tiled<E>* to) {
    for (int64_t r = 0; r < rows; r += W)
        for (int64_t k = 0; 2 * k < K; k += W) {
            auto columns = [&](int64_t i, Vec* pairs) { pairs_of_columns<E>(x + r, k + i, K, stride, rows - r, pairs); };
            transpose_in_slices<kSlices<E>>(columns, (Pair*)to + k * rows + r * W, W, pairs_of_row(K) * rows, rows - r < W ? rows - r : W);
        }
}

// 16 pairs of 16 rows, of which `columns` are there, and of each `rest` numbers: [slices, pairs, 32], slices `slice` apart.
template <class E, class X> inline void transpose_pairs(const X* rows, int64_t stride, int64_t columns, int64_t rest, Pair* to, int64_t slice) {
    constexpr int slices = kSlices<E>;
    if constexpr (slices == 1) {
        auto row = [&](int64_t i, Vec* pairs) {
            if (i < columns) slices_at<E>(rows + i * stride, rest, pairs);
        };
        transpose_in_slices<1>(row, to, kTwoTiles, slice);
    } else {  // as numbers, which are fewer than their slices
        for (int64_t k = 0; k < 2 * W; k += W, to += W / 2 * kTwoTiles) {
            Vec block[W];
            for (int64_t i = 0; i < W; ++i) block[i] = i < columns && k < rest ? load_some(rows + i * stride + k, rest - k) : Vec{};
            transpose_in_registers(block);
            PH_UNROLL(8) for (int i = 0; i < W; i += 2) {
                Vec pairs[slices];
                pairs_of_two_rows<slices>(block[i], block[i + 1], pairs);
                store_slices<slices>(pairs, to + i / 2 * kTwoTiles, slice);
            }
        }
    }
}

// Pairs [from, from + steps) of the rows [n, n + count) of a weight: [slices, steps, 32] for every 32 of them.
template <class T, class E>
void transpose_panel(const LinearWeight& f, int64_t n, int64_t count, int64_t K, int64_t from, int64_t steps, Tiled<E>* panel) {
    constexpr int slices = kSlices<E>;
    const int64_t slice = steps * kTwoTiles;
    for (int64_t c = 0; c < count; c += W) {
        Pair* to = (Pair*)panel + c / kTwoTiles * slices * slice + c % kTwoTiles;
        const int64_t columns = count - c < W ? count - c : W;
        if (f.transposed) {
            for (int64_t k = 0; k < steps; ++k) {
                Vec pairs[slices];
                pairs_of_columns<E>((const T*)f.weight + n + c, from + k, K, f.out_features, columns, pairs);
                store_slices<slices>(pairs, to + k * kTwoTiles, slice);
            }
        } else if (f.type) {
            float numbers[W * 2 * kBlockSteps];
            for (int64_t k = 0; k < steps; k += kBlockSteps) {
                const int64_t some = steps - k < kBlockSteps ? steps - k : kBlockSteps, first = 2 * (from + k);
                const int64_t rest = K - first < 2 * some ? K - first : 2 * some;
                for (int64_t i = 0; i < columns; ++i) unpack_run(f, n + c + i, first, rest, numbers + i * 2 * kBlockSteps);
                for (int64_t i = 0; i < some; i += W)
                    transpose_pairs<E>(numbers + 2 * i, 2 * kBlockSteps, columns, rest - 2 * i, to + (k + i) * kTwoTiles, slice);
            }
        } else {
            // Rows lie apart, so that no processor reads ahead by itself.
            const char* next = (const char*)((const T*)f.weight + (n + c + W) * K + 2 * from);
            for (int64_t i = 0; c + W + i < count && i < W; ++i)
                for (int64_t at = 0; at < 2 * steps * (int64_t)sizeof(T); at += 64) __builtin_prefetch(next + i * K * (int64_t)sizeof(T) + at, 0, 2);
            for (int64_t k = 0; k < steps; k += W)
                transpose_pairs<E>((const T*)f.weight + (n + c) * K + 2 * (from + k), K, columns, K - 2 * (from + k), to + k * kTwoTiles, slice);
        }
    }
}

template <int R, int N, int Slices, int... I>
inline void multiply_all_slices(const Pair* a, int64_t a_slice, const Pair* b, int64_t b_slice, std::integer_sequence<int, I...>) {
    (multiply_slices<R, N, Slices, I>(a, a_slice, b, b_slice), ...);
}

// c[rows, N · 16], `stride` apart, = or += a · b of packed tiles of `steps` pairs, whose slices are `a_slice` and `b_slice` apart.
template <int R, int N, int Slices>
inline void product_of_slices(int64_t rows, const Pair* a, int64_t a_slice, const Pair* b, int64_t b_slice, int64_t steps, float* c, int64_t stride, bool add) {
    constexpr bool apart = kSumsApart<Slices>;
    alignas(64) float sums[apart ? kTwoTiles * kTwoTiles : 1];
    begin_sums<R, N>(c, stride, add && !apart);
    for (int64_t k = 0; k < steps; k += kTile)
        multiply_all_slices<R, N, Slices>(a + k * rows, a_slice, b + k * kTwoTiles, b_slice,
                                          std::make_integer_sequence<int, kSliceProductCount<Slices>>{});
    if (!add || !apart) return store_sums<R, N>(c, stride);
    store_sums<R, N>(sums, kTwoTiles);
    for (int64_t r = 0; r < rows; ++r)
        PH_UNROLL(2) for (int n = 0; n < N * W; n += W) {
            float* to = c + r * stride + n;
            store_any(to, load(to) + load(sums + r * kTwoTiles + n));
        }
}

// sums[rows, count], `stride` apart: a packed tile of x, whose slices are `slice` apart, with a panel; added to what is
// there, if so.
template <class E>
void multiply_panel(int64_t rows, const Tiled<E>* x, int64_t slice, const Tiled<E>* panel, int64_t count, int64_t steps, float* sums, int64_t stride, bool add) {
    constexpr int slices = kSlices<E>;
    set_tile_rows(rows);
    int64_t k = 0, some;
    do {
        some = steps - k > kStepsAtOnce<E> * 3 / 2 ? kStepsAtOnce<E> : steps - k;
        for (int64_t n = 0; n < count; n += kTwoTiles)
            with_constant<2>(rows > kTile ? 2 : 1, [&](auto r) {
                with_constant<2>(count - n > kTile ? 2 : 1, [&](auto c) {
                    product_of_slices<r, c, slices>(rows, (const Pair*)x + k * rows, slice, (const Pair*)panel + n * slices * steps + k * kTwoTiles,
                                                    steps * kTwoTiles, some, sums + n, stride, add);
                });
            });
        add = true;
    } while ((k += some) < steps);
}

}  // namespace polyhead::PH_NAMESPACE
#endif
