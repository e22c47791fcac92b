// GEMM of weights in blocks with x in 8 bits: a prompt's products, each number with the bits of int8_activations.h.
//
// W rows of a weight become a panel, lane r of whose vectors is row r: one instruction multiplies four numbers of each
// with four of a row of x, and what a unit gives is scaled for W numbers of y at once.
#pragma once

#include <array>

#include "../products/activations.h"
#include "../products/rows.h"
#include "int8_activations.h"

namespace polyhead::PH_NAMESPACE {

// A unit of a row of x: four codes a word, sums of codes of each half, s and s Σ q.
struct Int8Words {
    int32_t codes[8], sums[2];
    float scale, total;
    int32_t unused[4];  // rows of numbers are rounded in place: a unit of float32 holds two of these
};
constexpr int64_t kWordsOfNumbers = sizeof(float) * kUnit / sizeof(Int8Words);
static_assert(sizeof(Int8Words) * kWordsOfNumbers == kUnit * sizeof(float));

constexpr int kInt8Tile = PH_WIDTH == 8 ? 4 : 8;  // rows of x that registers hold sums of

// Rows of x, each written to a place of its own, which may begin where the row does.
template <class T> void round_rows(const T* x, int64_t stride, int64_t rows, int64_t K, Int8Words* to, int64_t to_stride) {
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t u = 0; u < K / kUnit; ++u) {
            float numbers[kUnit];
            for (int v = 0; v < kVectors; ++v) store(load(x + m * stride + u * kUnit + v * W), numbers + v * W);
            const Int8Unit made = int8_unit_of(numbers, 1);
            Int8Words& words = to[m * to_stride + u];
            __builtin_memcpy(words.codes, &made.codes, sizeof words.codes);
            words.sums[0] = made.start[0] + made.start[1] + made.start[2] + made.start[3];
            words.sums[1] = made.start[4] + made.start[5] + made.start[6] + made.start[7];
            words.scale = made.scale, words.total = made.total;
        }
}

// Numbers of a panel for a unit: words of codes, scales of each half that has one, minima.
template <class B> constexpr int int8_unit_numbers() { return (8 + (Whole<B>::kHalved ? 2 : 1) + (Whole<B>::kMinimum ? 1 : 0)) * W; }

#if defined(__ARM_FEATURE_MATMUL_INT8) && PH_WIDTH == 4
#define PH_BYTE_MATRICES 1
#else
#define PH_BYTE_MATRICES 0
#endif

// Words of W rows of a unit's codes, transposed: to[i · W + r] is word i of row r, but for products of matrices.
inline void transpose_codes(const Bytes* rows, float* to) {
#if PH_WIDTH == 16
    VecInt a[8], b[8];
    PH_UNROLL(4) for (int i = 0; i < 4; ++i) {  // words 0 to 3 and 4 to 7 of four rows
        const VecInt x = load_any<VecInt>(rows + 4 * i), y = load_any<VecInt>(rows + 4 * i + 2);
        a[i] = __builtin_shufflevector(x, y, 0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        a[4 + i] = __builtin_shufflevector(x, y, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
    }
    PH_UNROLL(4) for (int i = 0; i < 4; ++i) {  // two words of eight rows, of the first and the last eight
        const VecInt x = a[2 * i], y = a[2 * i + 1];
        b[2 * i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        b[2 * i + 1] = __builtin_shufflevector(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    PH_UNROLL(4) for (int i = 0; i < 4; ++i) {
        const VecInt x = b[i / 2 * 4 + i % 2], y = b[i / 2 * 4 + i % 2 + 2];
        const VecInt first = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        const VecInt second = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        __builtin_memcpy(to + 2 * i * W, &first, sizeof first), __builtin_memcpy(to + (2 * i + 1) * W, &second, sizeof second);
    }
#elif PH_BYTE_MATRICES
    for (int r = 0; r < W; ++r)  // eight codes of two rows beside each other
        PH_UNROLL(4) for (int i = 0; i < 8; i += 2) __builtin_memcpy(to + (i + r / 2) * W + r % 2 * 2, (const char*)(rows + r) + 4 * i, 8);
#else
    for (int r = 0; r < W; ++r)
        PH_UNROLL(8) for (int i = 0; i < 8; ++i) __builtin_memcpy(to + i * W + r, (const char*)(rows + r) + 4 * i, 4);
#endif
}

template <class B, size_t... R> inline std::array<Whole<B>, W> wholes_at(const uint8_t* w, const int64_t* rows, const float* halves, std::index_sequence<R...>) {
    return {whole_at<B, W>(w + rows[R], halves, R)...};
}

// Rows [n, n + count) of a weight as a panel; lanes beyond repeat the last.
template <class B> void int8_panel(const LinearWeight& f, int64_t n, int64_t count, int64_t units, float* panel) {
    constexpr int kUnits = B::kNumbers / kUnit, kNumbers = int8_unit_numbers<B>(), kScales = Whole<B>::kHalved ? 2 : 1;
    const uint8_t* w = (const uint8_t*)f.weight + n * f.row_bytes;
    const uint8_t* ahead = w + W * f.row_bytes;  // of the next panel
    int64_t rows[W];
    for (int r = 0; r < W; ++r) rows[r] = (r < count ? r : count - 1) * f.row_bytes;
    for (int64_t u = 0; u < units; u += kUnits, w += B::kBytes, ahead += W * B::kBytes) {
        for (int i = 0; i < W * B::kBytes; i += 64) __builtin_prefetch(ahead + i);
        float halves[2 * W];
        for (int r = 0; r < W; r += 4)
            if (count == W) halves_of<B::kHalves, 4>(w + rows[r], f.row_bytes, halves + r * B::kHalves);
            else PH_UNROLL(4) for (int i = r; i < r + 4; ++i) halves_of<B::kHalves, 1>(w + rows[i], 0, halves + i * B::kHalves);
        const std::array<Whole<B>, W> blocks = wholes_at<B>(w, rows, halves, std::make_index_sequence<W>{});
        for (int j = 0; j < kUnits; ++j, panel += kNumbers) {
            Bytes codes[W];
            PH_UNROLL(16) for (int r = 0; r < W; ++r) {
                codes[r] = unsigned_codes<B>(blocks[r].codes(j));
                PH_UNROLL(2) for (int h = 0; h < kScales; ++h) panel[(8 + h) * W + r] = blocks[r].scale(j, h);
                if (Whole<B>::kMinimum) panel[(8 + kScales) * W + r] = blocks[r].minimum(j);
            }
            transpose_codes(codes, panel);
        }
    }
}

// Adds to sums[m] the products of words [from, to) of M rows of x and of a panel.
template <class B, int M> inline void add_words(VecInt* sums, const Int8Words* x, int64_t stride, const float* panel, int from, int to) {
#if PH_BYTE_MATRICES
    // Two rows of x with two of a weight at a time; codes of 7 bits are signed bytes too.
    PH_UNROLL(4) for (int m = 0; m < M; m += 2) {
        const int8_t *first = (const int8_t*)x[m * stride].codes, *second = (const int8_t*)x[(m + 1 < M ? m + 1 : m) * stride].codes;
        int32x4_t left{}, right{};
        PH_UNROLL(4) for (int i = from; i < to; i += 2) {
            const int8x16_t rows = vcombine_s8(vld1_s8(first + 4 * i), vld1_s8(second + 4 * i));
            left = vmmlaq_s32(left, rows, load_any<int8x16_t>(panel + i * W));
            right = vmmlaq_s32(right, rows, load_any<int8x16_t>(panel + (i + 1) * W));
        }
        const int64x2_t a = vreinterpretq_s64_s32(left), b = vreinterpretq_s64_s32(right);
        sums[m] += (VecInt)vzip1q_s64(a, b);
        if (m + 1 < M) sums[m + 1] += (VecInt)vzip2q_s64(a, b);
    }
#else
    PH_UNROLL(8) for (int i = from; i < to; ++i) {
        const VecInt codes = load_any<VecInt>(panel + i * W);
        PH_UNROLL(8) for (int m = 0; m < M; ++m) sums[m] = quad_dots<B>(sums[m], codes, splat_int(x[m * stride].codes[i]));
    }
#endif
}

// found[m]: what M rows of x, `stride` units apart, and a panel give.
template <class B, int M> void int8_tile(const Int8Words* x, int64_t stride, const float* panel, int64_t units, Vec* found) {
    constexpr int kScales = Whole<B>::kHalved ? 2 : 1;
    Vec acc[M] = {}, least[M] = {};
    for (int64_t u = 0; u < units; ++u, ++x, panel += int8_unit_numbers<B>()) {
        PH_UNROLL(2) for (int h = 0; h < kScales; ++h) {
            VecInt sums[M];
            PH_UNROLL(8) for (int m = 0; m < M; ++m) {
                const int32_t* of = x[m * stride].sums;
                sums[m] = start_of<B>() ? splat_int(start_of<B>() * (kScales == 2 ? of[h] : of[0] + of[1])) : VecInt{};
            }
            add_words<B, M>(sums, x, stride, panel, h * 4, kScales == 2 ? h * 4 + 4 : 8);
            const Vec scale = load(panel + (8 + h) * W);
            PH_UNROLL(8) for (int m = 0; m < M; ++m) acc[m] = multiply_add(acc[m], as_floats(sums[m]) * scale, splat(x[m * stride].scale));
        }
        if constexpr (Whole<B>::kMinimum) {
            const Vec minimum = load(panel + (8 + kScales) * W);
            PH_UNROLL(8) for (int m = 0; m < M; ++m) least[m] = multiply_add(least[m], minimum, splat(x[m * stride].total));
        }
    }
    PH_UNROLL(8) for (int m = 0; m < M; ++m) found[m] = acc[m] + least[m];
}

// Calls done(row, rows of it, a vector of columns for each) until every row of x has met a panel.
template <class B, class Done> inline void int8_tiles(const Int8Words* x, int64_t stride, int64_t rows, const float* panel, int64_t units, const Done& done) {
    Vec found[kInt8Tile];
    for (int64_t m = 0, some; m < rows; m += some) {
        some = rows - m < kInt8Tile ? rows - m : kInt8Tile;
        with_constant<kInt8Tile>(some, [&](auto count) { int8_tile<B, count>(x + m * stride, stride, panel, units, found); });
        done(m, some, found);
    }
}

// y[m, n] of rows in 8 bits for columns [first, last) of a weight, in whole panels.
template <class T> void int8_columns(const Int8Words* x, int64_t stride, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, float* panel, T* y, int64_t y_stride) {
    with_whole(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        for (int64_t n = first, count; n < last; n += count) {
            count = last - n < W ? last - n : W;
            int8_panel<B>(f, n, count, K / kUnit, panel);
            const Vec bias = f.bias ? load_some((const T*)f.bias + n, count) : Vec{};
            int8_tiles<B>(x, stride, rows, panel, K / kUnit, [&](int64_t m, int64_t some, const Vec* found) {
                for (int64_t r = 0; r < some; ++r) store_some(found[r] + bias, y + (m + r) * y_stride + n, count);
            });
        }
    });
}

// The part of `columns`, whole panels, that a thread takes.
inline int64_t panels_until(int64_t columns, int64_t thread, int64_t threads) {
    const int64_t until = (columns + W - 1) / W * thread / threads * W;
    return until < columns ? until : columns;
}

template <class T> void int8_gemm_of(const Gemm& p, int64_t thread, int64_t threads) {
    const int64_t units = p.in_features / kUnit;
    Int8Words* x = (Int8Words*)p.scratch.x();
    over_row_blocks(p.rows, p.in_features, [&](int64_t m, int64_t rows) {
        const int64_t from = rows * thread / threads, to = rows * (thread + 1) / threads;
        round_rows((const T*)p.x + (m + from) * p.x_stride, p.x_stride, to - from, p.in_features, x + from * units, units);
        wait_for_team();
        int64_t column = 0;
        for (int i = 0; i < p.count; column += p.weights[i++].out_features) {
            const LinearWeight& f = p.weights[i];
            int8_columns(x, units, rows, p.in_features, f, panels_until(f.out_features, thread, threads), panels_until(f.out_features, thread + 1, threads),
                         p.scratch.panel(thread), (T*)p.y + m * p.y_stride + column, p.y_stride);
        }
    });
}

// Hidden features [n, n + count) of rows in 8 bits, as float32.
template <class T> void int8_hidden(const Network& by, Bend bend, const Int8Words* x, int64_t rows, int64_t K, int64_t n, int64_t count, float* panel, float* hidden) {
    const int64_t F = by.up.out_features, units = K / kUnit;
    auto each = [&](const LinearWeight& f, const auto& done) {
        const Vec bias = f.bias ? load_some((const T*)f.bias + n, count) : Vec{};
        with_whole(f.type, [&](auto of) {
            using B = typename decltype(of)::Blocks;
            int8_panel<B>(f, n, count, units, panel);
            int8_tiles<B>(x, units, rows, panel, units, [&](int64_t m, int64_t some, const Vec* found) {
                for (int64_t r = 0; r < some; ++r) done(found[r] + bias, hidden + (m + r) * F + n);
            });
        });
    };
    if (by.gate.weight) each(by.gate, [&](Vec gate, float* at) { store_some(activated(by, bend, gate), at, count); });
    each(by.up, [&](Vec value, float* at) {
        store_some(by.gate.weight ? load_some(at, count) * multiplied_by_gate(by, value) : activated(by, bend, value), at, count);
    });
}

template <class T> void int8_network_of(const GemmNetwork& f, int64_t thread, int64_t threads) {
    const Gemm& p = f.in;
    const Network& by = f.network;
    const int64_t K = p.in_features, F = by.up.out_features, N = by.down.out_features, units = K / kUnit;
    Int8Words* x = (Int8Words*)p.scratch.x();
    float* hidden = p.scratch.hidden();
    float* panel = p.scratch.panel((int)thread);
    const Bend bend = bend_of<T>(by);
    over_row_blocks(p.rows, p.in_features, [&](int64_t m, int64_t rows) {
        const int64_t from = rows * thread / threads, to = rows * (thread + 1) / threads;
        round_rows((const T*)p.x + (m + from) * p.x_stride, p.x_stride, to - from, K, x + from * units, units);
        wait_for_team();
        const int64_t last = panels_until(F, thread + 1, threads);
        for (int64_t n = panels_until(F, thread, threads); n < last; n += W) int8_hidden<T>(by, bend, x, rows, K, n, last - n < W ? last - n : W, panel, hidden);
        wait_for_team();
        for (int64_t r = from; r < to; ++r) round_rows(hidden + r * F, F, 1, F, (Int8Words*)(hidden + r * F), 0);
        wait_for_team();
        int8_columns((const Int8Words*)hidden, F / kUnit * kWordsOfNumbers, rows, F, by.down, panels_until(N, thread, threads), panels_until(N, thread + 1, threads),
                     panel, (T*)p.y + m * p.y_stride, p.y_stride);
    });
}

}  // namespace polyhead::PH_NAMESPACE
