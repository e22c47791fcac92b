// Products of many rows in any order: outer products of columns of x and rows of Wᵀ, summed on tiles of registers.
//
// Rows of W are transposed into a panel, a part of K after the other, which the second cache holds while all rows of x
// meet it. Vectors are columns of y: nothing is added across lanes. Sums have other bits than GEMV's.
#pragma once

#include "../quantized/products.h"
#include "rows.h"
#include "tiles.h"

namespace polyhead::PH_NAMESPACE {

// An element of rows that are multiplied so: a number, or a pair of bfloat16, with matrix tiles where there are any.
template <class E> struct Outer { E element; };
template <> inline int64_t elements_of<Outer<float>>(int64_t K) { return K; }

constexpr int kOuterRows = PH_WIDTH == 16 ? 8 : 6, kOuterVectors = PH_WIDTH == 16 ? 3 : 2;
constexpr int64_t kOuterSteps = 768;  // elements along K of a panel
constexpr int64_t kOuterRun = 256;    // numbers of a row of blocks that are unpacked at a time
// Elements that are added up one after another before the sum is added to others, which keeps the rounding of long ones
// small; bfloat16 has less precision than any sum of pairs loses.
template <class E> constexpr int64_t kOuterSum = __is_same(E, float) ? 192 : 2 * kOuterSteps;

inline int64_t whole_vectors(int64_t elements) { return (elements + W - 1) / W * W; }

template <class E> constexpr bool kOnTiles = false;
template <class E> constexpr int64_t kOuterColumns = kOuterVectors * W;
#if PH_TILES
template <> constexpr bool kOnTiles<Pair> = true;
template <> constexpr int64_t kOuterColumns<Pair> = 2 * kTile;
#endif

// W elements of a row of K numbers, 0 behind the last.
template <class E, class T> inline Vec elements_at(const T* row, int64_t element, int64_t K) {
    if constexpr (__is_same(E, float)) {
        return load_some(row + element, K - element);
    } else {
        const int64_t rest = K - 2 * element;
        T some[2 * W] = {};
        if (rest < 2 * W) __builtin_memcpy(some, row + 2 * element, rest * sizeof(T));
        const T* from = rest < 2 * W ? some : row + 2 * element;
#if PH_PAIRS
        if constexpr (__is_same(T, float)) return pairs_of(from);
#endif
        return load_any<Vec>(from);
    }
}

// to[k · stride + c] = element k of row c, which `row(c, k)` gives W of; of C rows.
template <int C, class Row> inline void transpose_rows(int64_t elements, const Row& row, void* to, int64_t stride) {
    for (int64_t k = 0; k < elements; k += W)
        PH_UNROLL(2) for (int c = 0; c < C; c += W) {
            Vec block[W];
            PH_UNROLL(16) for (int i = 0; i < W; ++i) block[i] = c + i < C ? row(c + i, k) : Vec{};
            transpose_in_registers(block);
            const int lanes = C - c < W ? C - c : W;
            PH_UNROLL(16) for (int j = 0; j < W; ++j) __builtin_memcpy((float*)to + (k + j) * stride + c, block + j, lanes * sizeof(float));
        }
}

// A tile of rows of x: [elements, rows], or with matrix tiles W elements of every row after another.
template <class T, class E> void pack_tile(const T* x, int64_t stride, int64_t rows, int64_t K, Outer<E>* to) {
    const int64_t elements = whole_vectors(elements_of<E>(K));
    if constexpr (kOnTiles<E>) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < elements; k += W) store_any(to + k * rows + r * W, elements_at<E>(x + r * stride, k, K));
    } else {
        with_constant<kOuterRows>(rows, [&](auto count) {
            transpose_rows<count>(elements, [&](int r, int64_t k) { return elements_at<E>(x + r * stride, k, K); }, to, count);
        });
    }
}

// Elements [from, from + elements) of the rows [n, n + count) of a weight, kOuterColumns after another, each [elements, columns].
template <class T, class E>
void transpose_panel(const LinearWeight& f, int64_t n, int64_t count, int64_t K, int64_t from, int64_t elements, Outer<E>* panel) {
    constexpr int64_t columns = kOuterColumns<E>, numbers = __is_same(E, float) ? 1 : 2;
    for (int64_t c = 0; c < count; c += W) {
        Outer<E>* to = panel + c / columns * columns * elements + c % columns;
        auto transposed = [&](const auto* rows, int64_t stride, int64_t some, int64_t rest, Outer<E>* to) {
            transpose_rows<W>(some, [&](int i, int64_t k) { return c + i < count ? elements_at<E>(rows + i * stride, k, rest) : Vec{}; }, to, columns);
        };
        if (!f.type) {
            transposed((const T*)f.weight + (n + c) * K + from * numbers, K, elements, K - from * numbers, to);
            continue;
        }
        float runs[W * kOuterRun];
        for (int64_t k = 0, some; k < elements; k += some) {
            some = elements - k < kOuterRun / numbers ? elements - k : kOuterRun / numbers;
            const int64_t first = (from + k) * numbers, rest = K - first < some * numbers ? K - first : some * numbers;
            for (int64_t i = 0; i < W && c + i < count; ++i) unpack_run(f, n + c + i, first, rest, runs + i * kOuterRun);
            transposed((const float*)runs, kOuterRun, some, rest, to + k * columns);
        }
    }
}

// sums[R, N · W], `stride` apart, of a run; added to what is there, if so.
template <int R, int N, class E>
inline void sum_of_run(const E* x, const E* panel, int64_t elements, float* sums, int64_t stride, bool add) {
    constexpr int64_t columns = kOuterColumns<E>;
    Nothing none;
    if (!add) return tile_product<R, N, true>(none, x, R, panel, columns, elements, sums, stride, nullptr);
    float more[R * columns];
    tile_product<R, N, true>(none, x, R, panel, columns, elements, more, columns, nullptr);
    for (int r = 0; r < R; ++r)
        PH_UNROLL(4) for (int n = 0; n < N; ++n) {
            float* to = sums + r * stride + n * W;
            store(load(to) + load(more + r * columns + n * W), to);
        }
}

// sums[rows, count], `stride` apart: a packed tile of x with a panel; added to what is there, if so. A tile of more than
// kMaxStepRows rows has as many as most, or one less.
template <class E>
void multiply_panel(int64_t rows, const Outer<E>* x, const Outer<E>* panel, int64_t count, int64_t elements, float* sums, int64_t stride, bool add) {
    constexpr int64_t columns = kOuterColumns<E>;
    for (int64_t n = 0; n < count; n += columns, panel += columns * elements) {
        const int vectors = (int)(((count - n < columns ? count - n : columns) + W - 1) / W);
#if PH_TILES
        if constexpr (kOnTiles<E>) {
            set_tile_rows(rows);
            with_constant<2>(rows > kTile ? 2 : 1, [&](auto r) {
                with_constant<2>(vectors, [&](auto c) {
                    product_of_packed_tiles<r, c>(rows, (const Pair*)x, (const Pair*)panel, elements, sums + n, stride, add);
                });
            });
            continue;
        }
#endif
        with_constant<kOuterVectors>(vectors, [&](auto N) {
            auto multiply = [&](auto R) {
                int64_t k = 0, some;
                do {
                    some = elements - k > kOuterSum<E> * 5 / 4 ? kOuterSum<E> : elements - k;
                    sum_of_run<R, N>((const E*)(x + k * R), (const E*)(panel + k * columns), some, sums + n, stride, add || k);
                } while ((k += some) < elements);
            };
            if (rows == kOuterRows) multiply(std::integral_constant<int, kOuterRows>{});
            else multiply(std::integral_constant<int, kOuterRows - 1>{});
        });
    }
}

}  // namespace polyhead::PH_NAMESPACE
