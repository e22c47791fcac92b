// GEMM of weights in blocks with x in 8 bits: a prompt's products, each number with the bits of int8_activations.h.
//
// W rows of a weight become a panel, lane r of whose vectors is row r: one instruction multiplies four numbers of each
// with four of a row of x, and what a unit gives is scaled for W numbers of y at once. Matrix tiles multiply a unit of
// sixteen rows of x with one of a panel.
#pragma once

#include <array>

#include "../common/tile_products.h"
#include "../products/activations.h"
#include "../products/rows.h"
#include "int8_activations.h"

namespace polyhead::PH_NAMESPACE {

#if PH_TILES
constexpr int kInt8Rows = kTile;
#else
constexpr int kInt8Rows = PH_WIDTH == 8 ? 4 : 8;  // of x, that registers hold sums of
#endif

// A unit of rows of x: four codes a word, s and s Σ q, and sums of codes of each half. What a row that is not there holds is
// multiplied by tiles and not looked at.
struct alignas(64) Int8Group {
    int32_t codes[kInt8Rows][8];
    float scale[kInt8Rows], total[kInt8Rows];
    int16_t sums[2][kInt8Rows];
    // s Σ q of the numbers that share minimum h.
    template <class F> void totals(int h, float* to) const {
        PH_UNROLL(16) for (int m = 0; m < kInt8Rows; ++m) to[m] = F::kMinima == 2 ? scale[m] * (float)sums[h][m] : total[m];
    }
};
inline int64_t int8_groups(int64_t rows) { return (rows + kInt8Rows - 1) / kInt8Rows; }

// A group of up to kInt8Rows rows of x, so many units of each.
template <class T> void round_group(const T* x, int64_t stride, int64_t rows, int64_t units, Int8Group* to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t u = 0; u < units; ++u) {
            float numbers[kUnit];
            for (int v = 0; v < kVectors; ++v) store(load(x + r * stride + u * kUnit + v * W), numbers + v * W);
            const Int8Unit made = int8_unit_of(numbers, 1);
            __builtin_memcpy(to[u].codes[r], &made.codes, sizeof to->codes[r]);
            to[u].scale[r] = made.scale, to[u].total[r] = made.total;
            PH_UNROLL(2) for (int h = 0; h < 2; ++h)
                to[u].sums[h][r] = (int16_t)(made.start[4 * h] + made.start[4 * h + 1] + made.start[4 * h + 2] + made.start[4 * h + 3]);
        }
}

// Numbers of a panel for a unit: words of codes, scales and minima, of each half that has one.
template <class F> constexpr int int8_unit_numbers() { return (8 + F::kScales + F::kMinima) * W; }

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

// Codes as a panel holds them: tiles multiply bytes that both have a sign.
template <class F> inline Bytes panel_codes(Bytes codes) {
#if PH_TILES
    return codes - F::kMiddle;
#else
    return unsigned_codes<F>(codes);
#endif
}

// Rows [n, n + count) of a weight as a panel; lanes beyond repeat the last.
template <class B> [[gnu::noinline]] void int8_panel(const LinearWeight& f, int64_t n, int64_t count, int64_t units, float* panel) {
    using F = FormOf<B>;
    constexpr int kUnits = B::kNumbers / kUnit, kNumbers = int8_unit_numbers<F>();
    const uint8_t* w = (const uint8_t*)f.weight + n * f.row_bytes;
    const uint8_t* ahead = w + W * f.row_bytes;  // of the next panel
    int64_t rows[W];
    for (int r = 0; r < W; ++r) rows[r] = (r < count ? r : count - 1) * f.row_bytes;
    Given<B, W> given(f, n, count);
    for (int64_t u = 0; u < units; u += kUnits, w += B::kBytes, ahead += W * B::kBytes) {
        for (int i = 0; i < W * B::kBytes; i += 64) __builtin_prefetch(ahead + i);
        if (B::kScaled) given.blocks(w, f.row_bytes, u * kUnit, units * kUnit);
        else
            for (int r = 0; r < W; r += 4)
                if (count == W) halves_of<B::kHalves, 4>(w + rows[r], f.row_bytes, given.at + r * B::kHalves);
                else PH_UNROLL(4) for (int i = r; i < r + 4; ++i) halves_of<B::kHalves, 1>(w + rows[i], 0, given.at + i * B::kHalves);
        const auto blocks = wholes_at<B, W>([&](int r) { return w + rows[r]; }, given.at);
        for (int j = 0; j < kUnits; ++j, panel += kNumbers) {
            Bytes codes[W];
            PH_UNROLL(16) for (int r = 0; r < W; ++r) {
                codes[r] = panel_codes<F>(blocks[r].codes(j));
                PH_UNROLL(2) for (int h = 0; h < F::kScales; ++h) panel[(8 + h) * W + r] = blocks[r].scale(j, h);
                PH_UNROLL(2) for (int h = 0; h < F::kMinima; ++h) panel[(8 + F::kScales + h) * W + r] = blocks[r].minimum(j, h);
            }
            transpose_codes(codes, panel);
        }
    }
}

// Adds to least[m] what M rows of x and the minima of a panel give.
template <class F, int M = kInt8Rows> inline void add_minima(const Int8Group& x, const float* panel, Vec* least) {
    PH_UNROLL(2) for (int h = 0; h < F::kMinima; ++h) {
        float totals[kInt8Rows];
        x.totals<F>(h, totals);
        const Vec minimum = load(panel + (8 + F::kScales + h) * W);
        PH_UNROLL(16) for (int m = 0; m < M; ++m) least[m] = multiply_add(least[m], minimum, splat(totals[m]));
    }
}

#if PH_TILES
// found[m]: what rows of x and a panel give. While the sums of numbers that share a scale are scaled, the next ones are
// stored and those behind them multiplied.
template <class F> [[gnu::noinline]] void int8_tile(int64_t, const Int8Group* x, const float* panel, int64_t units, Vec* found) {
    constexpr int kScales = F::kScales, kWords = 8 / kScales, kNumbers = int8_unit_numbers<F>();
    if constexpr (F::kMinima) {
        Vec least[kTile] = {};
        for (int64_t u = 0; u < units; ++u) add_minima<F>(x[u], panel + u * kNumbers, least);
        PH_UNROLL(16) for (int m = 0; m < kTile; ++m) found[m] = least[m];
    } else PH_UNROLL(16) for (int m = 0; m < kTile; ++m) found[m] = Vec{};
    set_byte_tiles(kWords);
    const int64_t scales = units * kScales;
    // Nothing is captured by reference: acc would lie in memory.
    auto multiply = [=](int64_t i, auto tile) {
        const int64_t u = i / kScales, word = i % kScales * kWords;
        tile_zero<tile>();
        tile_load<4 + tile>(x[u].codes[0] + word, sizeof x->codes[0]);
        tile_load<6 + tile>(panel + u * kNumbers + word * W, W * sizeof(float));
        tile_multiply_add_bytes<tile, 4 + tile, 6 + tile>();
    };
    auto add_scaled = [=](int64_t i, const int32_t* sums, Vec* acc) {
        const Vec scale = load(panel + i / kScales * kNumbers + (8 + i % kScales) * W);
        const float* by = x[i / kScales].scale;
        PH_UNROLL(16) for (int m = 0; m < kTile; ++m) acc[m] = multiply_add(acc[m], as_floats(load_any<VecInt>(sums + m * kTile)) * scale, splat(by[m]));
    };
    constexpr std::integral_constant<int, 0> even{};
    constexpr std::integral_constant<int, 1> odd{};
    constexpr int64_t stride = kTile * sizeof(int32_t);
    alignas(64) int32_t sums[2][kTile * kTile];
    Vec acc[kTile] = {};
    multiply(0, even);
    if (scales > 1) multiply(1, odd);
    tile_store<even>(sums[even], stride);
    for (int64_t i = 0; i < scales; i += 2) {
        if (i + 2 < scales) multiply(i + 2, even);
        if (i + 1 < scales) tile_store<odd>(sums[odd], stride);
        add_scaled(i, sums[even], acc);
        if (i + 1 == scales) break;
        if (i + 3 < scales) multiply(i + 3, odd);
        if (i + 2 < scales) tile_store<even>(sums[even], stride);
        add_scaled(i + 1, sums[odd], acc);
    }
    PH_UNROLL(16) for (int m = 0; m < kTile; ++m) found[m] += acc[m];
}
#else
// Adds to sums[m] the products of words [from, to) of M rows of x and of a panel.
template <class F, int M> inline void add_words(VecInt* sums, const Int8Group& x, const float* panel, int from, int to) {
#if PH_BYTE_MATRICES
    // Two rows of x with two of a weight at a time; codes of 7 bits are signed bytes too.
    PH_UNROLL(4) for (int m = 0; m < M; m += 2) {
        const int8_t *first = (const int8_t*)x.codes[m], *second = (const int8_t*)x.codes[m + 1 < M ? m + 1 : m];
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
        PH_UNROLL(8) for (int m = 0; m < M; ++m) sums[m] = quad_dots<F>(sums[m], codes, splat_int(x.codes[m][i]));
    }
#endif
}

// found[m]: what M rows of x and a panel give.
template <class F, int M> [[gnu::noinline]] void int8_tile_of(const Int8Group* x, const float* panel, int64_t units, Vec* found) {
    Vec acc[M] = {}, least[M] = {};
    for (int64_t u = 0; u < units; ++u, ++x, panel += int8_unit_numbers<F>()) {
        PH_UNROLL(2) for (int h = 0; h < F::kScales; ++h) {
            VecInt sums[M];
            PH_UNROLL(8) for (int m = 0; m < M; ++m)
                sums[m] = F::kStart ? splat_int(F::kStart * (x->sums[h][m] + (F::kScales == 1 ? x->sums[1][m] : 0))) : VecInt{};
            add_words<F, M>(sums, *x, panel, h * 4, F::kScales == 2 ? h * 4 + 4 : 8);
            const Vec scale = load(panel + (8 + h) * W);
            PH_UNROLL(8) for (int m = 0; m < M; ++m) acc[m] = multiply_add(acc[m], as_floats(sums[m]) * scale, splat(x->scale[m]));
        }
        add_minima<F, M>(*x, panel, least);
    }
    PH_UNROLL(8) for (int m = 0; m < M; ++m) found[m] = acc[m] + least[m];
}
template <class F> inline void int8_tile(int64_t rows, const Int8Group* x, const float* panel, int64_t units, Vec* found) {
    with_constant<kInt8Rows>(rows, [&](auto some) { int8_tile_of<F, some>(x, panel, units, found); });
}
#endif

constexpr int kColumnsAtOnce = 32;  // of y, whose panels meet a group of rows while a near cache holds that
static_assert(kColumnsAtOnce == kUnit, "hidden features are rounded as soon as they are found");

// Columns [n, n + count) of a weight, at most kColumnsAtOnce, as panels; of a gate that is not there, none.
template <class T> struct Int8Panels {
    const LinearWeight& f;
    int64_t n, count, units, panels, numbers = 0;  // of a panel
    float* at;
    Int8Panels(const LinearWeight& f, int64_t n, int64_t count, int64_t units, float* at) : f(f), n(n), count(count), units(units), panels((count + W - 1) / W), at(at) {
        if (f.weight)
            numbers = with_whole(f.type, [&](auto of) {
                using B = typename decltype(of)::Blocks;
                const int64_t numbers = units * int8_unit_numbers<FormOf<B>>();
                for (int64_t i = 0; i < panels; ++i) int8_panel<B>(f, n + i * W, count - i * W < W ? count - i * W : W, units, at + i * numbers);
                return numbers;
            });
    }
    // Calls done(column of the count, columns, a vector of them for each row) for a group of rows of x.
    template <class Done> void over(const Int8Group* x, int64_t rows, const Done& done) const {
        if (!f.weight) return;
        Vec found[kInt8Rows];
        for (int64_t i = 0; i < panels; ++i) {
            const int64_t column = i * W, columns = count - column < W ? count - column : W;
            with_whole(f.type, [&](auto of) { int8_tile<FormOf<typename decltype(of)::Blocks>>(rows, x, at + i * numbers, units, found); });
            const Vec bias = f.bias ? load_some((const T*)f.bias + n + column, columns) : Vec{};
            for (int64_t r = 0; r < rows; ++r) found[r] += bias;
            done(column, columns, found);
        }
    }
};

// Calls of(group, rows of it) for the groups [first, last) of `rows` rows.
template <class Of> inline void over_groups(int64_t rows, int64_t first, int64_t last, const Of& of) {
    for (int64_t g = first; g < last; ++g) of(g, rows - g * kInt8Rows < kInt8Rows ? rows - g * kInt8Rows : kInt8Rows);
}

// The part of `columns`, in units, that a thread takes.
inline int64_t columns_until(int64_t columns, int64_t thread, int64_t threads) {
    const int64_t until = (columns + kColumnsAtOnce - 1) / kColumnsAtOnce * thread / threads * kColumnsAtOnce;
    return until < columns ? until : columns;
}

// Calls of(n, columns) for the columns of a thread.
template <class Of> inline void over_columns(int64_t columns, int64_t thread, int64_t threads, const Of& of) {
    const int64_t last = columns_until(columns, thread + 1, threads);
    for (int64_t n = columns_until(columns, thread, threads); n < last; n += kColumnsAtOnce) of(n, last - n < kColumnsAtOnce ? last - n : kColumnsAtOnce);
}

// y[m, n] of rows in 8 bits for a thread's columns of a weight.
template <class T> void int8_columns(const Int8Group* x, int64_t rows, int64_t units, const LinearWeight& f, int64_t thread, int64_t threads, float* panels, T* y, int64_t y_stride) {
    over_columns(f.out_features, thread, threads, [&](int64_t n, int64_t count) {
        const Int8Panels<T> by(f, n, count, units, panels);
        over_groups(rows, 0, int8_groups(rows), [&](int64_t g, int64_t some) {
            by.over(x + g * units, some, [&](int64_t column, int64_t columns, const Vec* found) {
                for (int64_t r = 0; r < some; ++r) store_some(found[r], y + (g * kInt8Rows + r) * y_stride + n + column, columns);
            });
        });
    });
}

// Rows [m, m + rows) of x in 8 bits, by all threads.
template <class T> Int8Group* int8_rows_of(const Gemm& p, int64_t m, int64_t rows, int64_t thread, int64_t threads) {
    const int64_t groups = int8_groups(rows), units = p.in_features / kUnit;
    Int8Group* x = (Int8Group*)p.scratch.x();
    over_groups(rows, groups * thread / threads, groups * (thread + 1) / threads, [&](int64_t g, int64_t some) {
        round_group((const T*)p.x + (m + g * kInt8Rows) * p.x_stride, p.x_stride, some, units, x + g * units);
    });
    wait_for_team();
    return x;
}

template <class T> void int8_gemm_of(const Gemm& p, int64_t thread, int64_t threads) {
    over_row_blocks(p.rows, p.in_features, [&](int64_t m, int64_t rows) {
        const Int8Group* x = int8_rows_of<T>(p, m, rows, thread, threads);
        int64_t column = 0;
        for (int i = 0; i < p.count; column += p.weights[i++].out_features)
            int8_columns(x, rows, p.in_features / kUnit, p.weights[i], thread, threads, p.scratch.panel(thread), (T*)p.y + m * p.y_stride + column, p.y_stride);
    });
}

template <class T> void int8_network_of(const GemmNetwork& f, int64_t thread, int64_t threads) {
    const Gemm& p = f.in;
    const Network& by = f.network;
    const int64_t F = by.up.out_features, units = p.in_features / kUnit;
    Int8Group* hidden = (Int8Group*)p.scratch.hidden();
    float* panels = p.scratch.panel((int)thread);
    const Bend bend = bend_of<T>(by);
    over_row_blocks(p.rows, p.in_features, [&](int64_t m, int64_t rows) {
        const Int8Group* x = int8_rows_of<T>(p, m, rows, thread, threads);
        over_columns(F, thread, threads, [&](int64_t n, int64_t count) {
            const Int8Panels<T> up(by.up, n, count, units, panels);
            const Int8Panels<T> gate(by.gate, n, count, units, panels + kColumnsAtOnce * panel_row(p.in_features));
            over_groups(rows, 0, int8_groups(rows), [&](int64_t g, int64_t some) {
                float features[kInt8Rows * kColumnsAtOnce];
                gate.over(x + g * units, some, [&](int64_t column, int64_t, const Vec* found) {
                    for (int64_t r = 0; r < some; ++r) store(activated(by, bend, found[r]), features + r * kColumnsAtOnce + column);
                });
                up.over(x + g * units, some, [&](int64_t column, int64_t, const Vec* found) {
                    for (int64_t r = 0; r < some; ++r) {
                        float* at = features + r * kColumnsAtOnce + column;
                        store(by.gate.weight ? load(at) * multiplied_by_gate(by, found[r]) : activated(by, bend, found[r]), at);
                    }
                });
                round_group(features, kColumnsAtOnce, some, 1, hidden + g * (F / kUnit) + n / kUnit);
            });
        });
        wait_for_team();
        int8_columns(hidden, rows, F / kUnit, by.down, thread, threads, panels, (T*)p.y + m * p.y_stride, p.y_stride);
    });
}

}  // namespace polyhead::PH_NAMESPACE
