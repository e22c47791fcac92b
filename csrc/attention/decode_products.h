// Products of decode: dots with keys where they lie, weighted sums of values where they lie. Additions are
// of one instruction with their product, named so: of two products a compiler may join either one.
#pragma once

#include "plan.h"

namespace polyhead::PH_NAMESPACE {

// Sums of as many vectors as there are lanes: one product row each for M rows and W / M keys, or,
// where M does not divide W, as many keys as fit.
template <int M> constexpr int kKeysAtOnce = W / M > 8 ? 8 : W / M;

// So few rows that memory limits the speed and registers suffice for twice the columns.
template <int M> constexpr bool kWide = PH_WIDTH == 16 && M <= 2;

// Queries in the form that products want: float32, or bfloat16 pairs where the processor takes those.
template <class T> constexpr bool kPairs = PH_PAIRS && __is_same(T, BFloat16);

// A row to prefetch: one cache line for each line that is read now, so that memory and arithmetic overlap;
// requested in bursts they would wait for each other.
inline void prefetch(const void* row) { __builtin_prefetch(row, 0, 2); }

// Keys whose successors a pass prefetches, a bit for each: if several passes read the same block, each
// prefetches its share of the next one.
constexpr uint64_t kAskAll = ~(uint64_t)0;
inline uint64_t share_to_ask(int64_t pass, int64_t passes) {
    uint64_t asked = 0;
    for (int64_t j = 8 * pass; j < kDecodeKeys; j += 8 * passes) asked |= (uint64_t)0xff << j;
    return asked;
}

// What a pass prefetches: for which keys, and how many numbers ahead; 0: the block that follows in memory.
struct Ask {
    uint64_t keys = kAskAll;
    int64_t ahead = 0;
};
inline int64_t distance_to_ask(const Ask& asked, int64_t j, int64_t token) {
    if (!(asked.keys >> (j & 63) & 1)) return 0;
    return asked.ahead ? asked.ahead : kDecodeKeys * token;
}

// For one or two rows, where memory limits the speed, every key is read to its end before the next one:
// several at once are several streams, which the processor prefetches less well. For more, the numbers of a
// row are kept for several keys.
template <int M, class T>
inline void dots(const void* q, int64_t D, const T* k, int64_t k_token, int64_t first, int64_t count,
                 float* s, int64_t s_stride, const Ask& asked) {
    constexpr int N = kKeysAtOnce<M>;
    const int64_t far = distance_to_ask(asked, first, k_token);
    Vec acc[W] = {};
    auto over_numbers = [&](int64_t step, auto&& add) {
        auto visit = [&](int n, int64_t d) {
            const T* key = k + (n < count ? n : 0) * k_token + d;
            prefetch(key + far);
            add(n, d, key);
        };
        if constexpr (kWide<M>) {
            PH_UNROLL(8) for (int n = 0; n < N; ++n)
                for (int64_t d = 0; d < D; d += step) visit(n, d);
        } else {
            for (int64_t d = 0; d < D; d += step)
                PH_UNROLL(8) for (int n = 0; n < N; ++n) visit(n, d);
        }
    };
    if constexpr (kPairs<T>) {
        if (D % (2 * W) == 0)
            over_numbers(2 * W, [&](int n, int64_t d, const T* key) {
                const Vec y = load_any<Vec>(key);
                PH_UNROLL(8) for (int m = 0; m < M; ++m)
                    acc[m * N + n] = multiply_add_pairs(acc[m * N + n], load_any<Vec>((const T*)q + m * D + d), y);
            });
    }
    if (!kPairs<T> || D % (2 * W) != 0)
        over_numbers(W, [&](int n, int64_t d, const T* key) {
            const Vec y = load(key);
            PH_UNROLL(8) for (int m = 0; m < M; ++m)
                acc[m * N + n] = multiply_add(acc[m * N + n], load((const float*)q + m * D + d), y);
        });
    float sums[W];
    store_any(sums, fold<W / 2>(acc));
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            if (n < count) s[m * s_stride + first + n] = sums[m * N + n];
}

template <int M, class T>
void dots_of_block(const void* q, int64_t D, const T* k, int64_t k_token, int64_t count, float* s,
                   int64_t s_stride, const Ask& asked = {}) {
    constexpr int N = kKeysAtOnce<M>;
    for (int64_t j = 0; j < count; j += N)
        dots<M, T>(q, D, k + j * k_token, k_token, j, count - j < N ? count - j : N, s, s_stride, asked);
}

// values[m] = factor[m] · values[m] + Σ_j s[m, j] v[j], for N vectors of columns.
template <int M, int N, class T>
inline void weighted_sum(const float* s, int64_t s_stride, const T* v, int64_t v_token, int64_t count,
                         float* values, int64_t width, const float* factors, const Ask& asked = {}) {
    Vec acc[M][N];
    PH_UNROLL(8) for (int m = 0; m < M; ++m)
        PH_UNROLL(8) for (int n = 0; n < N; ++n) acc[m][n] = load(values + m * width + n * W) * factors[m];
    for (int64_t j = 0; j < count; ++j) {
        Vec row[N];
        const T* next = v + j * v_token + distance_to_ask(asked, j, v_token);
        PH_UNROLL(8) for (int n = 0; n < N; ++n) {
            row[n] = load(v + j * v_token + n * W);
            prefetch(next + n * W);
        }
        PH_UNROLL(8) for (int m = 0; m < M; ++m) {
            const Vec weight = splat(s[m * s_stride + j]);
            PH_UNROLL(8) for (int n = 0; n < N; ++n) acc[m][n] = multiply_add(acc[m][n], weight, row[n]);
        }
    }
    PH_UNROLL(8) for (int m = 0; m < M; ++m)
        PH_UNROLL(8) for (int n = 0; n < N; ++n) store_any(values + m * width + n * W, acc[m][n]);
}

template <int M, class T>
void weighted_sums(const float* s, int64_t s_stride, const T* v, int64_t v_token, int64_t count,
                   float* values, int64_t width, const float* factors, const Ask& asked) {
    constexpr int N = PH_WIDTH == 16 ? 4 : 2;
    int64_t d = 0;
    if constexpr (kWide<M>)
        for (; d + 8 * W <= width; d += 8 * W)
            weighted_sum<M, 8, T>(s, s_stride, v + d, v_token, count, values + d, width, factors, asked);
    for (; d + N * W <= width; d += N * W)
        weighted_sum<M, N, T>(s, s_stride, v + d, v_token, count, values + d, width, factors, asked);
    for (; d < width; d += W)
        weighted_sum<M, 1, T>(s, s_stride, v + d, v_token, count, values + d, width, factors, asked);
}

#if PH_PAIRS
// The same for weights in pairs of keys and N times 2 W columns of bfloat16 values. Two rows of values
// are interleaved, which may leave columns in another order until the end.
template <int M, int N>
inline void weighted_sum_of_pairs(const Pair* s, int64_t s_stride, const BFloat16* v, int64_t v_token,
                                  int64_t count, float* values, int64_t width, const float* factors, const Ask& asked) {
    Vec acc[M][2 * N] = {};
    auto add = [&](int64_t j, const BFloat16* a, const BFloat16* b) {
        const BFloat16* next = a + distance_to_ask(asked, j, v_token);
        PH_UNROLL(8) for (int n = 0; n < N; ++n) {
            Vec low, high;
            interleave(a + n * 2 * W, b ? b + n * 2 * W : nullptr, low, high);
            prefetch(next + n * 2 * W);
            prefetch(next + v_token + n * 2 * W);
            PH_UNROLL(8) for (int m = 0; m < M; ++m) {
                const Vec weight = broadcast(s + m * s_stride + j / 2);
                acc[m][2 * n] = multiply_add_pairs(acc[m][2 * n], weight, low);
                acc[m][2 * n + 1] = multiply_add_pairs(acc[m][2 * n + 1], weight, high);
            }
        }
    };
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) add(j, v + j * v_token, v + (j + 1) * v_token);
    if (j < count) add(j, v + j * v_token, nullptr);
    PH_UNROLL(8) for (int m = 0; m < M; ++m)
        PH_UNROLL(8) for (int n = 0; n < N; ++n) {
            float* to = values + m * width + n * 2 * W;
            Vec left, right;
            columns_of(acc[m][2 * n], acc[m][2 * n + 1], left, right);
            store_any(to, multiply_add(left, load(to), splat(factors[m])));
            store_any(to + W, multiply_add(right, load(to + W), splat(factors[m])));
        }
}

template <int M>
void weighted_sums_of_pairs(const float* s, int64_t s_stride, const BFloat16* v, int64_t v_token,
                            int64_t count, float* values, int64_t width, const float* factors, const Ask& asked) {
    Pair weights[M * kDecodeKeys / 2];
    for (int m = 0; m < M; ++m)
        pack_weights(s + m * s_stride, up_to(count, 2 * W), weights + m * kDecodeKeys / 2);
    int64_t d = 0;
    if constexpr (kWide<M>)
        for (; d + 8 * W <= width; d += 8 * W)
            weighted_sum_of_pairs<M, 4>(weights, kDecodeKeys / 2, v + d, v_token, count, values + d, width, factors, asked);
    for (; d + 4 * W <= width; d += 4 * W)
        weighted_sum_of_pairs<M, 2>(weights, kDecodeKeys / 2, v + d, v_token, count, values + d, width, factors, asked);
    for (; d < width; d += 2 * W)
        weighted_sum_of_pairs<M, 1>(weights, kDecodeKeys / 2, v + d, v_token, count, values + d, width, factors, asked);
}
#endif

// Calls `step` with the first of up to four rows and their number as a constant, until there are no more.
// Runs are equally long: with four and one, the block would be read a second time for the one.
template <class Step> inline void four_at_a_time(int64_t rows, Step&& step) {
    int64_t i = 0;
    for (int64_t runs = (rows + 3) / 4; runs; --runs) {
        const int64_t count = (rows - i + runs - 1) / runs;
        with_constant<4>(count, [&](auto n) { step(i, n); });
        i += count;
    }
}

}  // namespace polyhead::PH_NAMESPACE
