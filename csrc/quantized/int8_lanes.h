// A decoding step's rows of x with weights in blocks, in 8 bits, each number with the bits of int8_activations.h.
//
// Lane m of a vector is row m of x: one instruction multiplies four codes of a row of a weight, which every lane has, with
// four of each row of x. A weight is unpacked and otherwise stays as it lies: int8_gemm.h transposes it, which takes the
// rows of a prompt to be worth it.
#pragma once

#include "int8_activations.h"

namespace polyhead::PH_NAMESPACE {

template <int L> struct LanesOf {
    typedef float Floats __attribute__((vector_size(4 * L)));
    typedef int32_t Ints __attribute__((vector_size(4 * L)));
};

#if PH_WIDTH == 16
inline LanesOf<8>::Floats multiply_add(LanesOf<8>::Floats sum, LanesOf<8>::Floats a, LanesOf<8>::Floats b) {
    return (LanesOf<8>::Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
}
#endif

// A unit of L rows of x: four codes a word, sums of codes of each half, s and s Σ q.
template <int L> struct Int8Lanes {
    int32_t codes[8][L], sums[2][L];
    float scale[L], total[L];
};

constexpr int kLaneRows = PH_WIDTH == 8 ? 4 : 8;  // of a weight, that registers hold sums of
constexpr int64_t kLaneNumbers = 1 << 18;         // of x, that a thread keeps on its stack: 8 rows of kMaxInt8Inputs

// A unit of rows of a weight: codes, and for each row the scale of each half that has one and the minimum.
template <class B> struct Int8Codes {
    static constexpr int kScales = Whole<B>::kHalved ? 2 : 1;
    int32_t codes[kLaneRows][8];
    float by[kLaneRows][kScales + Whole<B>::kMinimum];
};

// Rows of x as lanes; those beyond are 0.
template <int L> void lanes_of(const float* x, int64_t rows, int64_t K, Int8Lanes<L>* to) {
    for (int64_t u = 0; u < K / kUnit; ++u, ++to)
        for (int64_t m = 0; m < L; ++m) {
            const Int8Unit made = m < rows ? int8_unit_of(x + m * K + u * kUnit, 1) : Int8Unit{};
            const LaneInts words = (LaneInts)made.codes;
            PH_UNROLL(8) for (int i = 0; i < 8; ++i) to->codes[i][m] = words[i];
            PH_UNROLL(2) for (int h = 0; h < 2; ++h) to->sums[h][m] = made.start[4 * h] + made.start[4 * h + 1] + made.start[4 * h + 2] + made.start[4 * h + 3];
            to->scale[m] = made.scale, to->total[m] = made.total;
        }
}

// R rows of blocks, unpacked as rows [first, first + R) of units.
template <class B, int R> void codes_of_rows(const uint8_t* w, int64_t row_bytes, int64_t units, int first, Int8Codes<B>* to) {
    for (int64_t u = 0; u < units; u += B::kNumbers / kUnit, w += B::kBytes) {
        float halves[2 * R];
        halves_of<B::kHalves, R>(w, row_bytes, halves);
        PH_UNROLL(4) for (int r = 0; r < R; ++r) prefetch_block<B>(w + r * row_bytes);
        PH_UNROLL(8) for (int j = 0; j < B::kNumbers / kUnit; ++j, ++to) {
            float by[R][Int8Codes<B>::kScales + Whole<B>::kMinimum];
            PH_UNROLL(4) for (int r = 0; r < R; ++r) {
                const Whole<B> block = whole_at<B, R>(w + r * row_bytes, halves, r);
                store_any(to->codes[first + r], unsigned_codes<B>(block.codes(j)));
                PH_UNROLL(2) for (int h = 0; h < Int8Codes<B>::kScales; ++h) by[r][h] = block.scale(j, h);
                if (Whole<B>::kMinimum) by[r][Int8Codes<B>::kScales] = block.minimum(j);
            }
            __builtin_memcpy(to->by[first], by, sizeof by);
        }
    }
}

// found[r]: what L rows of x and row r of a weight give.
template <class B, int L> void lane_dots(const Int8Lanes<L>* x, const Int8Codes<B>* w, int64_t units, typename LanesOf<L>::Floats* found) {
    using Floats = typename LanesOf<L>::Floats;
    using Ints = typename LanesOf<L>::Ints;
    constexpr int R = kLaneRows, kScales = Int8Codes<B>::kScales;
    Floats acc[R] = {}, least[R] = {};
    for (int64_t u = 0; u < units; ++u, ++x, ++w) {
        const Floats by = load_any<Floats>(x->scale);
        PH_UNROLL(2) for (int h = 0; h < kScales; ++h) {
            Ints start{};
            if (start_of<B>()) start = start_of<B>() * (load_any<Ints>(x->sums[h]) + (kScales == 1 ? load_any<Ints>(x->sums[1]) : Ints{}));
            Ints sums[R];
            PH_UNROLL(8) for (int r = 0; r < R; ++r) sums[r] = start;
            PH_UNROLL(8) for (int i = 4 * h; i < (kScales == 2 ? 4 * h + 4 : 8); ++i) {
                const Ints codes = load_any<Ints>(x->codes[i]);
                PH_UNROLL(8) for (int r = 0; r < R; ++r) sums[r] = quad_dots<B>(sums[r], w->codes[r][i] - Ints{}, codes);
            }
            PH_UNROLL(8) for (int r = 0; r < R; ++r)
                acc[r] = multiply_add(acc[r], __builtin_convertvector(sums[r], Floats) * w->by[r][h], by);
        }
        if constexpr (Whole<B>::kMinimum) {
            const Floats total = load_any<Floats>(x->total);
            PH_UNROLL(8) for (int r = 0; r < R; ++r) least[r] = multiply_add(least[r], w->by[r][kScales] - Floats{}, total);
        }
    }
    PH_UNROLL(8) for (int r = 0; r < R; ++r) found[r] = acc[r] + least[r];
}

// Calls of(first row, rows, their Int8Lanes), which lie behind each other: of at most W lanes, or 8 where they are enough.
template <class Of> inline void over_lanes(int64_t rows, int64_t units, void* at, const Of& of) {
    char* next = (char*)at;
    for (int64_t m = 0; m < rows;) {
        const int64_t left = rows - m;
        auto some = [&](auto lanes) {
            constexpr int L = lanes;
            of(m, left < L ? left : L, (Int8Lanes<L>*)next);
            m += L, next += units * sizeof(Int8Lanes<L>);
        };
        constexpr int kFew = W < 8 ? W : 8;
        if (left <= kFew) some(std::integral_constant<int, kFew>{});
        else some(std::integral_constant<int, W>{});
    }
}

// done(first row, rows, n, columns, dots[row · stride + column]) until every row of x [rows, K] has met columns
// [first, last) of a weight; columns at a time are at most `stride`, which is kLaneRows or more.
template <class Done>
void over_lanes_int8(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, int64_t stride, const Done& done) {
    with_whole(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        const int64_t units = K / kUnit, row_bytes = f.row_bytes, lanes = (rows + 7) / 8 * 8;
        void* made = __builtin_alloca_with_align(lanes * units * sizeof(Int8Lanes<1>), 8 * 64);
        auto* codes = (Int8Codes<B>*)__builtin_alloca_with_align(units * sizeof(Int8Codes<B>), 8 * 64);
        float* dots = (float*)__builtin_alloca(W * stride * sizeof(float));
        over_lanes(rows, units, made, [&](int64_t m, int64_t some, auto* to) { lanes_of(x + m * K, some, K, to); });
        for (int64_t n = first, count; n < last; n += count) {
            count = last - n < kLaneRows ? last - n : kLaneRows;
            const uint8_t* w = (const uint8_t*)f.weight + n * row_bytes;
            int r = 0;
            for (; r + 4 <= count; r += 4) codes_of_rows<B, 4>(w + r * row_bytes, row_bytes, units, r, codes);
            for (; r < kLaneRows; ++r)  // those beyond repeat the last
                codes_of_rows<B, 1>(w + (r < count ? r : count - 1) * row_bytes, 0, units, r, codes);
            over_lanes(rows, units, made, [&](int64_t m, int64_t some, auto* by) {
                constexpr int L = sizeof by->scale / sizeof(float);
                typename LanesOf<L>::Floats found[kLaneRows];
                lane_dots<B, L>(by, codes, units, found);
                const float* of_row = (const float*)found;
                for (int64_t i = 0; i < some; ++i)
                    for (int64_t c = 0; c < count; ++c) dots[i * stride + c] = of_row[c * L + i];
                done(m, some, n, count, dots);
            });
        }
    });
}

}  // namespace polyhead::PH_NAMESPACE
