// A decoding step's rows of x with weights in blocks, in 8 bits, each number with the bits of int8_activations.h.
//
// Lane m of a vector is row m of x: one instruction multiplies four codes of a row of a weight, which every lane has, with
// four of each row of x. Where a vector has twice the lanes, lanes 2 m and 2 m + 1 are row m, for two rows of a weight. A
// weight is unpacked and otherwise stays as it lies: int8_gemm.h transposes it, which takes the rows of a prompt to be
// worth it.
#pragma once

#include "int8_activations.h"

namespace polyhead::PH_NAMESPACE {

constexpr int kFewLanes = W < 8 ? W : 8;     // rows of x that vectors have at least
constexpr int kPair = W / kFewLanes;         // rows of a weight that lie side by side
template <int L> constexpr int kCopies = W / L;  // lanes of a row of x

// `N` numbers again and again.
template <int N, class Numbers, class T> inline Numbers repeated(const T* p) {
    if constexpr (N == 1) return *p - Numbers{};
#if PH_WIDTH == 16
    else return (Numbers)_mm512_set1_epi64(load_any<int64_t>(p));
#endif
}

// A unit of L rows of x: four codes a word, sums of codes of each half, s and s Σ q.
template <int L> struct Int8Lanes {
    int32_t codes[8][W], sums[2][W];
    float scale[W], total[W];
};

constexpr int kLaneRows = PH_WIDTH == 8 ? 4 : 8;  // of a weight, that registers hold sums of
constexpr int64_t kLaneNumbers = 1 << 18;         // of x, that a thread keeps on its stack: 8 rows of kMaxInt8Inputs

// A unit of rows of a weight: codes, and for each row the scale, and the minimum, of each half that has one.
struct Int8Codes {
    int32_t codes[kLaneRows / kPair][8][kPair];
    float scales[2][kLaneRows / kPair][kPair], minima[2][kLaneRows / kPair][kPair];
};

// Rows of x as lanes; those beyond are 0.
template <int L> void lanes_of(const float* x, int64_t rows, int64_t K, Int8Lanes<L>* to) {
    for (int64_t u = 0; u < K / kUnit; ++u, ++to)
        for (int64_t m = 0; m < L; ++m) {
            const Int8Unit made = m < rows ? int8_unit_of(x + m * K + u * kUnit, 1) : Int8Unit{};
            const LaneInts words = (LaneInts)made.codes;
            PH_UNROLL(2) for (int64_t lane = m * kCopies<L>; lane < (m + 1) * kCopies<L>; ++lane) {
                PH_UNROLL(8) for (int i = 0; i < 8; ++i) to->codes[i][lane] = words[i];
                PH_UNROLL(2) for (int h = 0; h < 2; ++h) to->sums[h][lane] = made.start[4 * h] + made.start[4 * h + 1] + made.start[4 * h + 2] + made.start[4 * h + 3];
                to->scale[lane] = made.scale, to->total[lane] = made.total;
            }
        }
}

// Rows n to n + R of a weight, unpacked as rows [first, first + R) of units.
template <class B, int R> void codes_of_rows(const LinearWeight& f, int64_t n, int64_t units, int first, Int8Codes* to) {
    using F = FormOf<B>;
    const int64_t row_bytes = f.row_bytes;
    const uint8_t* w = (const uint8_t*)f.weight + n * row_bytes;
    Given<B, R> given(f, n);
    for (int64_t u = 0; u < units; u += B::kNumbers / kUnit, w += B::kBytes) {
        given.blocks(w, row_bytes, u * kUnit, units * kUnit);
        if (B::kBytes > 32 || u % 2 == 0)  // a line has more than one short block
            PH_UNROLL(4) for (int r = 0; r < R; ++r) prefetch_block<B>(w + r * row_bytes);
        const auto blocks = wholes_at<B, R>([&](int r) { return w + r * row_bytes; }, given.at);
        PH_UNROLL(8) for (int j = 0; j < B::kNumbers / kUnit; ++j, ++to) {
            LaneInts codes[R];
            PH_UNROLL(4) for (int r = 0; r < R; ++r) {
                codes[r] = (LaneInts)unsigned_codes<F>(blocks[r].codes(j));
                const int row = first + r;
                PH_UNROLL(2) for (int h = 0; h < F::kScales; ++h) to->scales[h][row / kPair][row % kPair] = blocks[r].scale(j, h);
                PH_UNROLL(2) for (int h = 0; h < F::kMinima; ++h) to->minima[h][row / kPair][row % kPair] = blocks[r].minimum(j, h);
            }
            if constexpr (kPair == 1) {
                PH_UNROLL(4) for (int r = 0; r < R; ++r) store_any(to->codes[first + r], codes[r]);
            } else if constexpr (R % 2 == 0) {
                PH_UNROLL(4) for (int r = 0; r < R; r += 2)
                    store_any(to->codes[(first + r) / 2], __builtin_shufflevector(codes[r], codes[r + 1], 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
            } else {
                PH_UNROLL(8) for (int i = 0; i < 8; ++i) to->codes[first / 2][i][first % 2] = codes[0][i];
            }
        }
    }
}

// Rows n to n + count of a weight, unpacked; those beyond repeat the last.
inline void codes_of(const LinearWeight& f, int64_t n, int64_t count, int64_t units, Int8Codes* to) {
    with_whole(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        int r = 0;
        for (; r + 4 <= count; r += 4) codes_of_rows<B, 4>(f, n + r, units, r, to);
        for (; r < kLaneRows; ++r) codes_of_rows<B, 1>(f, n + (r < count ? r : count - 1), units, r, to);
    });
}

// found[v], in the lanes of row m of x: what that and rows [v · N, v · N + N) of a weight give; N = kCopies<L>.
template <class F, int L> [[gnu::noinline]] void lane_dots(const Int8Lanes<L>* x, const Int8Codes* w, int64_t units, Vec* found) {
    constexpr int N = kCopies<L>, V = kLaneRows / N;
    Vec acc[V] = {}, least[V] = {};
    for (int64_t u = 0; u < units; ++u, ++x, ++w) {
        const Vec by = load_any<Vec>(x->scale);
        PH_UNROLL(2) for (int h = 0; h < F::kScales; ++h) {
            VecInt start{};
            if (F::kStart) start = F::kStart * (load_any<VecInt>(x->sums[h]) + (F::kScales == 1 ? load_any<VecInt>(x->sums[1]) : VecInt{}));
            VecInt sums[V];
            PH_UNROLL(8) for (int v = 0; v < V; ++v) sums[v] = start;
            PH_UNROLL(8) for (int i = 4 * h; i < (F::kScales == 2 ? 4 * h + 4 : 8); ++i) {
                const VecInt codes = load_any<VecInt>(x->codes[i]);
                PH_UNROLL(8) for (int v = 0; v < V; ++v)
                    sums[v] = quad_dots<F>(sums[v], repeated<N, VecInt>(&w->codes[v * N / kPair][i][v * N % kPair]), codes);
            }
            PH_UNROLL(8) for (int v = 0; v < V; ++v)
                acc[v] = multiply_add(acc[v], as_floats(sums[v]) * repeated<N, Vec>(&w->scales[h][v * N / kPair][v * N % kPair]), by);
        }
        PH_UNROLL(2) for (int h = 0; h < F::kMinima; ++h) {
            const Vec total = F::kMinima == 2 ? by * as_floats(load_any<VecInt>(x->sums[h])) : load_any<Vec>(x->total);
            PH_UNROLL(8) for (int v = 0; v < V; ++v)
                least[v] = multiply_add(least[v], repeated<N, Vec>(&w->minima[h][v * N / kPair][v * N % kPair]), total);
        }
    }
    PH_UNROLL(8) for (int v = 0; v < V; ++v) found[v] = acc[v] + least[v];
}

// Calls of(first row, rows, their Int8Lanes), which lie behind each other: of at most W rows, or 8 where they are enough.
template <class Of> inline void over_lanes(int64_t rows, int64_t units, void* at, const Of& of) {
    char* next = (char*)at;
    for (int64_t m = 0; m < rows;) {
        const int64_t left = rows - m;
        auto some = [&](auto lanes) {
            constexpr int L = lanes;
            of(m, left < L ? left : L, (Int8Lanes<L>*)next, std::integral_constant<int, L>{});
            m += L, next += units * sizeof(Int8Lanes<L>);
        };
        if (left <= kFewLanes) some(std::integral_constant<int, kFewLanes>{});
        else some(std::integral_constant<int, W>{});
    }
}

// done(first row, rows, n, columns, dots[row · stride + column]) until every row of x [rows, K] has met columns
// [first, last) of a weight; columns at a time are at most `stride`, which is kLaneRows or more.
template <class Done>
void over_lanes_int8(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, int64_t stride, const Done& done) {
    const int64_t units = K / kUnit, vectors = (rows + W - 1) / W;
    void* made = __builtin_alloca_with_align(vectors * units * sizeof(Int8Lanes<W>), 8 * 64);
    auto* codes = (Int8Codes*)__builtin_alloca_with_align(units * sizeof(Int8Codes), 8 * 64);
    float* dots = (float*)__builtin_alloca(W * stride * sizeof(float));
    over_lanes(rows, units, made, [&](int64_t m, int64_t some, auto* to, auto) { lanes_of(x + m * K, some, K, to); });
    for (int64_t n = first, count; n < last; n += count) {
        count = last - n < kLaneRows ? last - n : kLaneRows;
        codes_of(f, n, count, units, codes);
        over_lanes(rows, units, made, [&](int64_t m, int64_t some, auto* by, auto of_lanes) {
            constexpr int L = of_lanes, N = kCopies<L>;
            Vec found[kLaneRows / N];
            with_whole(f.type, [&](auto of) { lane_dots<FormOf<typename decltype(of)::Blocks>, L>(by, codes, units, found); });
            const float* at = (const float*)found;
            for (int64_t i = 0; i < some; ++i)
                for (int64_t c = 0; c < count; ++c) dots[i * stride + c] = at[c / N * W + i * N + c % N];
            done(m, some, n, count, dots);
        });
    }
}

}  // namespace polyhead::PH_NAMESPACE
