// Products of decode: dots with keys where they lie, weighted sums of values where they lie. Additions are
// of one instruction with their product, named so: of two products a compiler may join either one.
#pragma once

#include "../common/look_ahead.h"
#include "plan.h"

namespace polyhead::PH_NAMESPACE {

// Sums of as many vectors as there are lanes: one product row each for M rows and so many keys.
template <int M> constexpr int kKeysAtOnce = W / (M == 3 ? 4 : M);

// So few rows that memory limits the speed and registers suffice for twice the columns.
template <int M> constexpr bool kWide = PH_WIDTH == 16 && M <= 3;

// Queries in the form that products want: float32, or bfloat16 pairs where the processor takes those.
template <class T> constexpr bool kPairs = PH_PAIRS && __is_same(T, BFloat16);

// A row to prefetch, into the first cache or the second: one cache line for each line that is read now, so that memory
// and arithmetic overlap; requested in bursts they would wait for each other.
inline void prefetch(const void* row, bool first_cache) {
    if (first_cache) __builtin_prefetch(row, 0, 3);
    else __builtin_prefetch(row, 0, 2);
}

// How far ahead of the row that it reads a pass over a block prefetches. A single pass looks about so many bytes
// ahead as the processor's LookAhead has; of several over the same block, each looks a whole block ahead, for its share
// of the rows.
constexpr uint64_t kAllKeys = ~(uint64_t)0;
struct Ask {
    uint64_t keys;   // a bit for each row, modulo 64: whether it looks ahead
    int64_t near;    // how many rows ahead
    int64_t length;  // rows of the block: what is ahead of its last ones lies in the next block
    int64_t beyond;  // elements between the end of this block and the next one
    bool first_cache = look_ahead_here.first_cache;
    bool is_single_pass() const { return keys == kAllKeys; }
    // Elements from row j, of which each has `token`, to the row to prefetch; 0: none.
    int64_t distance(int64_t j, int64_t token) const {
        if (!(keys >> (j & 63) & 1)) return 0;
        return near * token + (j + near < length ? 0 : beyond);
    }
};

// `ahead`: numbers from a block to the next one; 0: it follows in memory.
template <class T>
inline Ask ask_for(int64_t pass, int64_t passes, int64_t length, int64_t width, int64_t token, int64_t ahead) {
    Ask ask{kAllKeys, length, length, ahead ? ahead - length * token : 0};
    if (passes > 1) {
        ask.keys = 0;
        for (int64_t j = 8 * pass; j < kDecodeKeys; j += 8 * passes) ask.keys |= (uint64_t)0xff << j;
    } else {
        const int64_t near = look_ahead_here.bytes / (width * (int64_t)sizeof(T)) + 1;
        if (near < length) ask.near = near;
    }
    return ask;
}

// Dots of M rows with every key of a block, of vectors of `Size` numbers. Keys are read one after the other where
// memory limits the speed: several at once are several streams, which the processor prefetches less well. Rows of
// C vectors stay in registers; where there are more (C: 0), the vectors of four rows are kept for several keys.
template <int M, int C, bool Paired, class T>
void dots_of_rows(const void* q, int64_t D, const T* k, int64_t k_token, int64_t count, float* s, int64_t s_stride, const Ask& ask) {
    constexpr int N = kKeysAtOnce<M>;
    constexpr int64_t kSize = Paired ? 2 * W : W;
    auto row = [&](int m, int64_t d) { return Paired ? load_any<Vec>((const T*)q + m * D + d) : load((const float*)q + m * D + d); };
    Vec kept[M][C ? C : 1];
    if constexpr (C > 0)
        PH_UNROLL(8) for (int m = 0; m < M; ++m)
            PH_UNROLL(8) for (int i = 0; i < C; ++i) kept[m][i] = row(m, i * kSize);
    for (int64_t first = 0; first < count; first += N) {
        const int64_t far = ask.distance(first, k_token), here = count - first < N ? count - first : N;
        Vec acc[W] = {};
        auto visit = [&](int n, int64_t d, const auto& row_of) {
            const T* key = k + (first + (n < here ? n : 0)) * k_token + d;
            prefetch(key + far, ask.first_cache);
            const Vec y = Paired ? load_any<Vec>(key) : load(key);
            PH_UNROLL(8) for (int m = 0; m < M; ++m)
                acc[m * N + n] = Paired ? multiply_add_pairs(acc[m * N + n], row_of(m), y) : multiply_add(acc[m * N + n], row_of(m), y);
        };
        if constexpr (C > 0) {
            PH_UNROLL(16) for (int n = 0; n < N; ++n)
                PH_UNROLL(8) for (int i = 0; i < C; ++i) visit(n, i * kSize, [&](int m) { return kept[m][i]; });
        } else if (M < 4 || ask.is_single_pass()) {
            PH_UNROLL(16) for (int n = 0; n < N; ++n)
                for (int64_t d = 0; d < D; d += kSize) visit(n, d, [&](int m) { return row(m, d); });
        } else {
            for (int64_t d = 0; d < D; d += kSize)
                PH_UNROLL(16) for (int n = 0; n < N; ++n) visit(n, d, [&](int m) { return row(m, d); });
        }
        float sums[W];
        store_any(sums, fold<W / 2>(acc));
        for (int m = 0; m < M; ++m) {
            float* to = s + m * s_stride + first;
            if (here == N)
                __builtin_memcpy(to, sums + m * N, N * sizeof(float));
            else
                __builtin_memcpy(to, sums + m * N, here * sizeof(float));
        }
    }
}

template <int M, class T>
void dots_of_block(const void* q, int64_t D, const T* k, int64_t k_token, int64_t count, float* s,
                   int64_t s_stride, const Ask& ask) {
    auto by = [&](auto paired) {
        constexpr int64_t kSize = paired ? 2 * W : W;
        auto with = [&](auto vectors) { dots_of_rows<M, vectors, paired, T>(q, D, k, k_token, count, s, s_stride, ask); };
        if constexpr (PH_WIDTH == 16) {
            if (D == 2 * kSize) return with(std::integral_constant<int, 2>{});
            if (D == 4 * kSize) return with(std::integral_constant<int, 4>{});
            if constexpr (M < 4)
                if (D == 8 * kSize) return with(std::integral_constant<int, 8>{});
        }
        with(std::integral_constant<int, 0>{});
    };
    if constexpr (kPairs<T>)
        if (D % (2 * W) == 0) return by(std::true_type{});
    by(std::false_type{});
}

#if PH_WIDTH == 16
// Dots of up to W rows, each in a lane of its own, so that nothing is added across lanes: `q` is [size, W], and a
// key `size` elements, numbers or pairs. Writes W rows of kDecodeKeys dots, for whole vectors of keys.
template <class E>
void dots_in_lanes(const E* q, int64_t size, const void* k, int64_t k_bytes, int64_t count, float* s, const Ask& ask) {
    constexpr int N = W / 2;
    auto dots_of_half = [&](int64_t first, Vec* to) {
        const int64_t far = ask.distance(first, k_bytes);
        const char* key[N];
        for (int n = 0; n < N; ++n) key[n] = (const char*)k + (first + n < count ? first + n : 0) * k_bytes;
        Vec acc[N] = {};
        for (int64_t d = 0; d < size; d += W) {
            PH_UNROLL(8) for (int n = 0; n < N; ++n) prefetch(key[n] + far + d * (int64_t)sizeof(E), ask.first_cache);
            PH_UNROLL(16) for (int i = 0; i < W; ++i) {
                const Vec x = load_elements(q + (d + i) * W);
                PH_UNROLL(8) for (int n = 0; n < N; ++n) {
                    const E y = load_any<E>(key[n] + (d + i) * (int64_t)sizeof(E));
                    acc[n] = multiply_add_of<E>(acc[n], x, broadcast(&y));
                }
            }
        }
        PH_UNROLL(8) for (int n = 0; n < N; ++n) to[n] = acc[n];
    };
    for (int64_t j = 0; j < count; j += W) {
        Vec rows[W];
        dots_of_half(j, rows), dots_of_half(j + N, rows + N);
        transpose_in_registers(rows);
        for (int m = 0; m < W; ++m) store_any(s + m * kDecodeKeys + j, rows[m]);
    }
}
#endif

// values[m] = factor[m] · values[m] + Σ_j s[m, j] v[j], for N vectors of columns.
template <int M, int N, class T>
inline void weighted_sum(const float* s, int64_t s_stride, const T* v, int64_t v_token, int64_t count,
                         float* values, int64_t width, const float* factors, const Ask& ask) {
    Vec acc[M][N];
    PH_UNROLL(8) for (int m = 0; m < M; ++m)
        PH_UNROLL(8) for (int n = 0; n < N; ++n) acc[m][n] = load(values + m * width + n * W) * factors[m];
    for (int64_t j = 0; j < count; ++j) {
        Vec row[N];
        const T* next = v + j * v_token + ask.distance(j, v_token);
        PH_UNROLL(8) for (int n = 0; n < N; ++n) {
            row[n] = load(v + j * v_token + n * W);
            prefetch(next + n * W, ask.first_cache);
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
                   float* values, int64_t width, const float* factors, const Ask& ask) {
    constexpr int N = PH_WIDTH == 16 ? 4 : 2;
    int64_t d = 0;
    if constexpr (kWide<M>)
        for (; d + 8 * W <= width; d += 8 * W)
            weighted_sum<M, 8, T>(s, s_stride, v + d, v_token, count, values + d, width, factors, ask);
    for (; d + N * W <= width; d += N * W)
        weighted_sum<M, N, T>(s, s_stride, v + d, v_token, count, values + d, width, factors, ask);
    for (; d < width; d += W)
        weighted_sum<M, 1, T>(s, s_stride, v + d, v_token, count, values + d, width, factors, ask);
}

#if PH_PAIRS
// The same for weights in pairs of keys and N times 2 W columns of bfloat16 values. Two rows of values
// are interleaved, which may leave columns in another order until the end.
template <int M, int N>
inline void weighted_sum_of_pairs(const Pair* s, int64_t s_stride, const BFloat16* v, int64_t v_token,
                                  int64_t count, float* values, int64_t width, const float* factors, const Ask& ask) {
    Vec acc[M][2 * N] = {};
    auto add = [&](int64_t j, const BFloat16* a, const BFloat16* b) {
        const BFloat16* next = a + ask.distance(j, v_token);
        PH_UNROLL(8) for (int n = 0; n < N; ++n) {
            Vec low, high;
            interleave(a + n * 2 * W, b ? b + n * 2 * W : nullptr, low, high);
            prefetch(next + n * 2 * W, ask.first_cache);
            prefetch(next + v_token + n * 2 * W, ask.first_cache);
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
                            int64_t count, float* values, int64_t width, const float* factors, const Ask& ask) {
    Pair weights[M * kDecodeKeys / 2];
    for (int m = 0; m < M; ++m)
        pack_weights(s + m * s_stride, up_to(count, 2 * W), weights + m * kDecodeKeys / 2);
    int64_t d = 0;
    if constexpr (kWide<M>)
        for (; d + 8 * W <= width; d += 8 * W)
            weighted_sum_of_pairs<M, 4>(weights, kDecodeKeys / 2, v + d, v_token, count, values + d, width, factors, ask);
    for (; d + 4 * W <= width; d += 4 * W)
        weighted_sum_of_pairs<M, 2>(weights, kDecodeKeys / 2, v + d, v_token, count, values + d, width, factors, ask);
    for (; d < width; d += 2 * W)
        weighted_sum_of_pairs<M, 1>(weights, kDecodeKeys / 2, v + d, v_token, count, values + d, width, factors, ask);
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
