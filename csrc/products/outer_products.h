// Products of many rows in any order: outer products of columns of x and rows of Wᵀ, summed on tiles of registers.
//
// Rows of W are transposed into a panel, a part of K after the other, which the second cache holds while all rows of x
// meet it. Vectors are columns of y: nothing is added across lanes. Sums have other bits than GEMV's.
#pragma once

#include "../quantized/products.h"
#include "rows.h"
#include "tiles.h"

namespace polyhead::PH_NAMESPACE {

// An element of rows that are multiplied so: a number, or a pair of bfloat16.
template <class E> struct Outer { E element; };
template <class E> constexpr bool kInAnyOrder<Outer<E>> = true;
template <> inline int64_t elements_of<Outer<float>>(int64_t K) { return K; }

constexpr int kOuterRows = PH_WIDTH == 16 ? 8 : 6, kOuterVectors = PH_WIDTH == 16 ? 3 : 2;
constexpr int64_t kOuterSteps = 768;
template <class E> constexpr int64_t kPanelSteps<Outer<E>> = kOuterSteps;
static_assert(kOuterSteps * 5 / 4 <= kMostOuterPart);
constexpr int64_t kOuterRun = 256;    // numbers of a row of blocks that are unpacked at a time
// Elements that are added up one after another before the sum is added to others, which keeps the rounding of long ones
// small; bfloat16 has less precision than any sum of pairs loses.
template <class E> constexpr int64_t kOuterSum = __is_same(E, float) ? 192 : 2 * kOuterSteps;

inline int64_t whole_vectors(int64_t elements) { return (elements + W - 1) / W * W; }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && PH_WIDTH == 4
#define PH_PAIR_MATRICES 1
#else
#define PH_PAIR_MATRICES 0
#endif
// Whether two rows of x are multiplied with two columns at a time: two elements of each row and column lie side by side.
template <class E> constexpr bool kByTwo = PH_PAIR_MATRICES && !__is_same(E, float);
// Place of element k of row r of R.
template <class E> inline int64_t place(int64_t k, int64_t r, int64_t R) {
    return kByTwo<E> ? (k / 2 * R + r) * 2 + k % 2 : k * R + r;
}

constexpr int64_t kOuterColumns = kOuterVectors * W;

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

// Element k of row c, which `row(c, k)` gives W of, to its place; of C rows, from `first` of `stride` on.
template <int C, class E, class Row> inline void transpose_rows(int64_t elements, const Row& row, E* to, int64_t first, int64_t stride) {
    if constexpr (kByTwo<E>) {
        for (int c = 0; c < C; ++c)
            for (int64_t k = 0; k < elements; k += W) {
                const Vec found = row(c, k);
                PH_UNROLL(2) for (int i = 0; i < W; i += 2)
                    __builtin_memcpy((float*)to + place<E>(k + i, first + c, stride), (const float*)&found + i, 8);
            }
    } else {
        for (int64_t k = 0; k < elements; k += W)
            PH_UNROLL(2) for (int c = 0; c < C; c += W) {
                Vec block[W];
                PH_UNROLL(16) for (int i = 0; i < W; ++i) block[i] = c + i < C ? row(c + i, k) : Vec{};
                transpose_in_registers(block);
                const int lanes = C - c < W ? C - c : W;
                PH_UNROLL(16) for (int j = 0; j < W; ++j) __builtin_memcpy((float*)to + (k + j) * stride + first + c, block + j, lanes * sizeof(float));
            }
    }
}

// A tile of rows of x: [elements, rows].
template <class T, class E> void pack_tile(const T* x, int64_t stride, int64_t rows, int64_t K, Outer<E>* to) {
    const int64_t elements = whole_vectors(elements_of<E>(K));
    with_constant<kOuterRows>(rows, [&](auto count) {
        transpose_rows<count, E>(elements, [&](int r, int64_t k) { return elements_at<E>(x + r * stride, k, K); }, (E*)to, 0, count);
    });
}

// The same of x [K, rows], whose rows are `stride` apart.
template <class T, class E> void pack_transposed(const T* x, int64_t stride, int64_t rows, int64_t K, Outer<E>* to) {
    const int64_t elements = whole_vectors(elements_of<E>(K));
    auto element = [&](int64_t k, int r) {
        if constexpr (__is_same(E, float)) return k < K ? to_float(x[k * stride + r]) : 0.0f;
        else return (2 * k < K ? x[2 * k * stride + r].bits : 0u) | (2 * k + 1 < K ? (uint32_t)x[(2 * k + 1) * stride + r].bits << 16 : 0u);
    };
    auto put = [&](int64_t k, int r, int64_t at) {
        const auto found = element(k, r);
        __builtin_memcpy(to + at, &found, 4);
    };
    with_constant<kOuterRows>(rows, [&](auto count) {
        for (int64_t k = 0; k < elements; ++k)
            PH_UNROLL(8) for (int r = 0; r < count; ++r) put(k, r, place<E>(k, r, count));
    });
}

// Elements of W columns of a weight [K, stride].
template <class E, class T> inline Vec columns_at(const T* w, int64_t element, int64_t K, int64_t stride, int64_t columns) {
    if constexpr (__is_same(E, float)) {
        return element < K ? load_some(w + element * stride, columns) : Vec{};
    } else {
        auto bits = [&](int64_t k) { return k < K ? (VecWord)load_some(w + k * stride, columns) : VecWord{}; };
        return (Vec)(bits(2 * element) >> 16 | bits(2 * element + 1));
    }
}

// Elements [from, from + elements) of the rows [n, n + count) of a weight, kOuterColumns after another, each [elements, columns].
template <class T, class E>
void transpose_panel(const LinearWeight& f, int64_t n, int64_t count, int64_t K, int64_t from, int64_t elements, Outer<E>* panel) {
    constexpr int64_t columns = kOuterColumns, numbers = __is_same(E, float) ? 1 : 2;
    if (f.transposed) {
        auto row = [&](int64_t k, int64_t c) { return columns_at<E>((const T*)f.weight + n + c, from + k, K, f.out_features, count - c); };
        for (int64_t k = 0; k < elements; k += kByTwo<E> ? 2 : 1)
            for (int64_t c = 0; c < count; c += W) {
                Outer<E>* to = panel + c / columns * columns * elements + place<E>(k, c % columns, columns);
                if constexpr (kByTwo<E>) {
                    const Vec a = row(k, c), b = row(k + 1, c);
                    store_any(to, __builtin_shufflevector(a, b, 0, 4, 1, 5)), store_any(to + W, __builtin_shufflevector(a, b, 2, 6, 3, 7));
                } else {
                    store_any(to, row(k, c));
                }
            }
        return;
    }
    for (int64_t c = 0; c < count; c += W) {
        Outer<E>* to = panel + c / columns * columns * elements;
        auto transposed = [&](const auto* rows, int64_t stride, int64_t some, int64_t rest, Outer<E>* to) {
            transpose_rows<W, E>(some, [&](int i, int64_t k) { return c + i < count ? elements_at<E>(rows + i * stride, k, rest) : Vec{}; }, (E*)to, c % columns, columns);
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

#if PH_PAIR_MATRICES
// As tile_product, of R rows packed by two: four numbers of y a register, of two rows and two columns.
template <int R, int N>
inline void product_by_two(const Pair* x, const Pair* panel, int64_t panel_row, int64_t elements, float* sums, int64_t stride) {
    constexpr int P = (R + 1) / 2, C = 2 * N;
    auto pairs = [](const Pair* at) { return load_any<bfloat16x8_t>(at); };
    float32x4_t acc[P][C] = {};
    for (int64_t k = 0; k < elements; k += 2, x += 2 * R, panel += 2 * panel_row) {
        bfloat16x8_t columns[C];
        PH_UNROLL(4) for (int c = 0; c < C; ++c) columns[c] = pairs(panel + 4 * c);
        PH_UNROLL(4) for (int p = 0; p < P; ++p) {  // of an odd row the other is not looked at
            const bfloat16x8_t rows = pairs(x + 4 * p);
            PH_UNROLL(4) for (int c = 0; c < C; ++c) acc[p][c] = vbfmmlaq_f32(acc[p][c], rows, columns[c]);
        }
    }
    PH_UNROLL(8) for (int r = 0; r < R; ++r)
        PH_UNROLL(4) for (int n = 0; n < N; ++n) {
            const float64x2_t a = vreinterpretq_f64_f32(acc[r / 2][2 * n]), b = vreinterpretq_f64_f32(acc[r / 2][2 * n + 1]);
            store_any(sums + r * stride + n * W, r % 2 ? vzip2q_f64(a, b) : vzip1q_f64(a, b));
        }
}
#endif

// tile_product of a tile as it was packed.
template <int R, int N, class E> inline void product_of_tile(const E* x, const E* panel, int64_t elements, float* sums, int64_t stride) {
#if PH_PAIR_MATRICES
    if constexpr (kByTwo<E>) return product_by_two<R, N>(x, panel, kOuterColumns, elements, sums, stride);
#endif
    Nothing none;
    tile_product<R, N, true>(none, x, R, panel, kOuterColumns, elements, sums, stride, nullptr);
}

// sums[R, N · W], `stride` apart, of a run; added to what is there, if so.
template <int R, int N, class E>
inline void sum_of_run(const E* x, const E* panel, int64_t elements, float* sums, int64_t stride, bool add) {
    constexpr int64_t columns = kOuterColumns;
    if (!add) return product_of_tile<R, N>(x, panel, elements, sums, stride);
    float more[R * columns];
    product_of_tile<R, N>(x, panel, elements, more, columns);
    for (int r = 0; r < R; ++r)
        PH_UNROLL(4) for (int n = 0; n < N; ++n) {
            float* to = sums + r * stride + n * W;
            store(load(to) + load(more + r * columns + n * W), to);
        }
}

// sums[rows, count], `stride` apart: a packed tile of x with a panel; added to what is there, if so. A tile of more than
// kMaxStepRows rows has as many as most, or one less.
template <class E>
void multiply_panel(int64_t rows, const Outer<E>* x, int64_t /*slice*/, const Outer<E>* panel, int64_t count, int64_t elements, float* sums, int64_t stride, bool add) {
    constexpr int64_t columns = kOuterColumns;
    for (int64_t n = 0; n < count; n += columns, panel += columns * elements) {
        const int vectors = (int)(((count - n < columns ? count - n : columns) + W - 1) / W);
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
