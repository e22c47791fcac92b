// The same products in whole numbers, where the processor multiplies bytes and adds them up in fours.
//
// A factor x of a code (a query times a scale, or a weight times a scale) becomes n = round(x / step),
// |n| ≤ 127 · 257, of two digits: n = 256 · high + low, both of them signed bytes. Sums are exact; the step,
// 2⁻¹⁵ of the greatest factor, is far below the rounding of 16-bit queries, the only ones that are computed
// this way.
#pragma once

#include "decode_quantized.h"

namespace polyhead::PH_NAMESPACE {

#if defined(__AVX512VNNI__) && PH_WIDTH == 16
#define PH_BYTES 1
#else
#define PH_BYTES 0
#endif

template <class T> constexpr bool kInBytes = PH_BYTES && !__is_same(T, float);
constexpr float kMostFactor = 127.0f * 257.0f;
constexpr float kLeastFactor = 1e-34f;   // a greatest factor below which steps would be no number
constexpr int64_t kColumns = 32;         // of values, in which four tokens lie beside each other
constexpr int64_t kMostKeySize = 4096;   // beyond which the sums of a lane would not fit 32 bits

#if PH_BYTES
// 64 or 32 codes; those beyond `count` are 0.
inline __m512i chunk_of(const uint8_t* p, int64_t count) {
    if (count >= kChunk) return load_any<__m512i>(p);
    return _mm512_maskz_loadu_epi8(((__mmask64)1 << count) - 1, p);
}
inline __m512i chunk_of(const Byte* p, int64_t count) { return chunk_of(&p->bits, count); }
inline __m512i chunk_of(const LowHalf* p, int64_t count) {
    return chunk_of(&p->bits, count) & _mm512_set1_epi8(15);
}
inline __m512i chunk_of(const HighHalf* p, int64_t count) {
    return _mm512_srli_epi16(chunk_of(&p->bits, count), 4) & _mm512_set1_epi8(15);
}
inline __m256i columns_of(const Byte* p) { return load_any<__m256i>(p); }
inline __m256i columns_of(const LowHalf* p) { return load_any<__m256i>(p) & _mm256_set1_epi8(15); }
inline __m256i columns_of(const HighHalf* p) {
    return _mm256_srli_epi16(load_any<__m256i>(p), 4) & _mm256_set1_epi8(15);
}

// Accumulators have lanes of 32 bits for the compiler too, which copies them around otherwise.
inline VecInt add_products(VecInt sum, __m512i codes, __m512i digits) {
    return (VecInt)_mm512_dpbusd_epi32((__m512i)sum, codes, digits);
}

// 4 W factors in units of a step, as digits.
inline void split_digits(const Vec* factors, int8_t* high, int8_t* low) {
    __m512i n[4];
    PH_UNROLL(4) for (int i = 0; i < 4; ++i) n[i] = _mm512_cvtps_epi32((__m512)factors[i]);
    // Packing takes four lanes of each in turn; the last step puts them back in order.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i a = _mm512_packs_epi32(n[0], n[1]), b = _mm512_packs_epi32(n[2], n[3]);
    const __m512i half = _mm512_set1_epi16(128);
    const __m512i highs = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                             _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
    const __m512i lows = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8),
                                            _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    store_any(high, _mm512_permutexvar_epi32(order, highs));
    store_any(low, _mm512_permutexvar_epi32(order, lows));
}

inline float steps_of_greatest(float factor) { return factor > kLeastFactor ? kMostFactor / factor : 0.0f; }

// M queries times the scales of a unit, in digits, of which high and low lie [2, row] for each query.
// Lane m · N + n of the vectors belongs to row m, as in the sums of `integer_dots`.
template <int M> struct Factors {
    int8_t* digits;
    int64_t row;
    Vec step{}, start{};
};

template <int M>
inline void factors_of(const Unit& unit, const float* q, int64_t D, float* scaled, Factors<M>& to) {
    constexpr int N = kKeysAtOnce<M>;
    Vec starts[M] = {}, most[M] = {};
    for (int64_t d = 0; d < D; d += W) {
        const Vec scale = load(unit.k_scale + d), zero = load(unit.k_zero + d);
        PH_UNROLL(4) for (int m = 0; m < M; ++m) {
            const Vec x = load(q + m * D + d), factor = x * scale;
            starts[m] += x * zero;
            most[m] = larger((Vec)((VecInt)factor & 0x7fffffff), most[m]);
            store_any(scaled + m * to.row + d, factor);
        }
    }
    for (int m = 0; m < M; ++m) {
        const float peak = largest(most[m]), start = sum(starts[m]);
        for (int n = 0; n < N; ++n) to.step[m * N + n] = peak * (1.0f / kMostFactor), to.start[m * N + n] = start;
        const float steps = steps_of_greatest(peak);
        int8_t *high = to.digits + m * 2 * to.row, *low = high + to.row;
        for (int64_t d = 0; d < to.row; d += 4 * W) {
            Vec factors[4];
            for (int i = 0; i < 4; ++i) factors[i] = load(scaled + m * to.row + d + i * W) * steps;
            split_digits(factors, high + d, low + d);
        }
    }
}

// What to prefetch for the next block while the keys of this one are read.
struct Later {
    const uint8_t *k, *v;
    int64_t v_bytes;        // of a token
};

template <int M, class E>
inline void integer_dots(const Factors<M>& factors, int64_t D, const E* k, int64_t count, float* s,
                         const Later& later) {
    constexpr int N = kKeysAtOnce<M>;
    for (int64_t j = 0; j < count; j += N, k += N * D) {
        const int64_t here = count - j < N ? count - j : N;
        VecInt acc[M * N] = {};
        PH_UNROLL(2) for (int digit = 0; digit < 2; ++digit) {
            if (digit)
                PH_UNROLL(16) for (int i = 0; i < M * N; ++i) acc[i] <<= 8;
            for (int64_t d = 0; d < D; d += kChunk) {
                __m512i x[M];
                PH_UNROLL(8) for (int m = 0; m < M; ++m)
                    x[m] = load_any<__m512i>(factors.digits + (m * 2 + digit) * factors.row + d);
                PH_UNROLL(8) for (int n = 0; n < N; ++n) {
                    const E* row = k + (n < here ? n : 0) * D + d;
                    const __m512i codes = chunk_of(row, D - d);
                    if (!digit) prefetch(later.k + (row - k) + j * D, look_ahead_here.first_cache);
                    PH_UNROLL(8) for (int m = 0; m < M; ++m) acc[m * N + n] = add_products(acc[m * N + n], codes, x[m]);
                }
            }
        }
        for (int64_t b = 0; b < here * later.v_bytes; b += 64) prefetch(later.v + j * later.v_bytes + b, look_ahead_here.first_cache);
        Vec wide[W] = {};
        PH_UNROLL(16) for (int i = 0; i < M * N; ++i) wide[i] = __builtin_convertvector(acc[i], Vec);
        float sums[W];
        store_any(sums, fold<W / 2>(wide) * factors.step + factors.start);
        if (here == N)
            for (int m = 0; m < M; ++m) __builtin_memcpy(s + m * kDecodeKeys + j, sums + m * N, N * sizeof(float));
        else
            for (int m = 0; m < M; ++m) __builtin_memcpy(s + m * kDecodeKeys + j, sums + m * N, here * sizeof(float));
    }
}

template <int M>
void integer_dots_of_block(const Attention& c, const Coding& g, const CodedBlock& block, const float* q,
                           const CodedScratch& scratch, float* s) {
    const int64_t D = c.key_dim;
    Factors<M> factors;
    factors.digits = scratch.digits, factors.row = up_to(D, kChunk);
    for (int n = 0; n < block.count; ++n) {
        const Span& span = block.spans[n];
        factors_of<M>(span.unit, q, D, scratch.scaled, factors);
        over_rows(span.unit.k, g.k_bits, g.group, D, span.first, span.count,
                  [&](const auto* codes, int64_t count, int64_t offset) {
            const int64_t v_bytes = c.value_dim * g.v_bits / 8, from = span.first + offset;
            const Unit& next = block.next[n];
            const Later later{next.k + ((const uint8_t*)codes - span.unit.k), next.v + from * v_bytes, v_bytes};
            integer_dots<M>(factors, D, codes, count, s + span.at + offset, later);
        });
    }
}

// Four rows of V codes to [V / kColumns, kColumns, 4], `stride` bytes from one kColumns to the next.
// Columns are in the order that unpacking leaves (see `in_order`).
template <class E>
inline void beside_each_other(const E* row, int64_t V, uint8_t* to, int64_t stride) {
    for (int64_t d = 0; d < V; d += kColumns, row += kColumns, to += stride) {
        const __m256i a = columns_of(row), b = columns_of(row + V);
        const __m256i c = columns_of(row + 2 * V), e = columns_of(row + 3 * V);
        const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
        const __m256i low2 = _mm256_unpacklo_epi8(c, e), high2 = _mm256_unpackhi_epi8(c, e);
        store_any(to, _mm256_unpacklo_epi16(low, low2));
        store_any(to + 32, _mm256_unpackhi_epi16(low, low2));
        store_any(to + 64, _mm256_unpacklo_epi16(high, high2));
        store_any(to + 96, _mm256_unpackhi_epi16(high, high2));
    }
}

// Values of a block to [V / kColumns, tokens / 4, kColumns, 4]: codes of four tokens beside each other.
inline void interleave(const Attention& c, const Coding& g, const CodedBlock& block, int64_t length,
                       const CodedScratch& scratch) {
    const int64_t V = c.value_dim, stride = (length + 3) / 4 * kColumns * 4;
    auto put = [&](const auto* row, int64_t j) {
        beside_each_other(row, V, scratch.codes + j / 4 * kColumns * 4, stride);
    };
    for (int n = 0; n < block.count; ++n) {
        const Span& span = block.spans[n];
        over_rows(span.unit.v, g.v_bits, g.group, V, span.first, span.count,
                  [&](const auto* codes, int64_t count, int64_t offset) {
            const int64_t at = span.at + offset;
            for (int64_t j = 0; j < count;) {
                if ((at + j) % 4 == 0 && j + 4 <= count) {
                    put(codes + j * V, at + j);
                    j += 4;
                    continue;
                }
                // Four tokens that are not adjacent: missing ones have weight 0.
                for (int64_t d = 0; d < V; d += kColumns)
                    store_any(scratch.loose + (at + j) % 4 * V + d, columns_of(codes + j * V + d));
                put((const Byte*)scratch.loose, at + j++);
            }
        });
    }
}

inline void in_order(Vec a, Vec b, Vec& left, Vec& right) {
    left = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    right = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Weights of M rows times the scales of a share, in digits.
template <int M> struct Weights {
    alignas(64) int8_t digits[M][2][kDecodeKeys];
    float step[M], start[M];
};

template <int M>
inline void weights_of(const float* s, const float* scale, const float* zero, int64_t padded, Weights<M>& to) {
    PH_UNROLL(4) for (int m = 0; m < M; ++m, s += kDecodeKeys) {
        Vec start{}, most{}, factors[kDecodeKeys / W] = {};
        for (int64_t j = 0; j < padded; j += W) {
            const Vec weight = load(s + j);
            start += weight * load(zero + j);
            factors[j / W] = weight * load(scale + j);
            most = larger(factors[j / W], most);
        }
        // Checks the factors, not the scales: those of a hidden token may have any value.
        const float peak = largest(most), steps = steps_of_greatest(peak);
        for (Vec& factor : factors) factor *= steps;
        split_digits(factors, to.digits[m][0], to.digits[m][1]);
        to.start[m] = sum(start);
        to.step[m] = peak * (1.0f / kMostFactor);
    }
}

// values[m] = factor[m] · values[m] + Σ_j s[m, j] (zero[j] + scale[j] code_j).
template <int M>
void integer_sums(const Attention& c, const Coding& g, int64_t length, const CodedScratch& scratch,
                  const float* s, float* values, const float* factors) {
    const int64_t fours = (length + 3) / 4, padded = up_to(length, W);
    Weights<M> weights;
    const uint8_t* codes = scratch.codes;
    for (int64_t d = 0; d < c.value_dim; d += kColumns) {
        const int64_t share = d / g.v_share * kDecodeKeys;
        if (d % g.v_share == 0) weights_of<M>(s, scratch.scale + share, scratch.zero + share, padded, weights);
        VecInt acc[M][2][2] = {};
        for (int64_t a = 0; a < fours; ++a, codes += 4 * kColumns) {
            const __m512i x = load_any<__m512i>(codes), y = load_any<__m512i>(codes + 64);
            PH_UNROLL(4) for (int m = 0; m < M; ++m)
                PH_UNROLL(2) for (int digit = 0; digit < 2; ++digit) {
                    const __m512i weight = _mm512_set1_epi32(load_any<int32_t>(weights.digits[m][digit] + a * 4));
                    acc[m][digit][0] = add_products(acc[m][digit][0], x, weight);
                    acc[m][digit][1] = add_products(acc[m][digit][1], y, weight);
                }
        }
        PH_UNROLL(4) for (int m = 0; m < M; ++m) {
            Vec sums[2], left, right;
            for (int i = 0; i < 2; ++i)
                sums[i] = (__builtin_convertvector(acc[m][0][i], Vec) * 256.0f +
                           __builtin_convertvector(acc[m][1][i], Vec)) * weights.step[m] + weights.start[m];
            in_order(sums[0], sums[1], left, right);
            float* to = values + m * c.value_dim + d;
            store_any(to, load(to) * factors[m] + left);
            store_any(to + W, load(to + W) * factors[m] + right);
        }
    }
}
#endif

}  // namespace polyhead::PH_NAMESPACE
