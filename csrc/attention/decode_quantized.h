// Decode over keys and values in 8 or 4 bits, which are read where they lie and never decoded:
//
//     q · k_j = Σ_d q_d zero_d + Σ_d (q_d scale_d) code_jd              scales of a unit, for each column
//     o_d = Σ_j p_j zero_jd + Σ_j (p_j scale_jd) code_jd               scales of a token, shared by columns
//
// The numbers are not rounded to the type of the cache in between, as decoding does.
#pragma once

#include "decode_products.h"

namespace polyhead::PH_NAMESPACE {

constexpr int kMostSpans = kDecodeKeys / 2 + 1;
constexpr int64_t kChunk = 64;      // codes of a key that are multiplied at once, in whole numbers

// Memory for one block of keys.
struct CodedScratch {
    float *scale, *zero;      // [V / v_share, kDecodeKeys] of the values
    float* scaled;            // [4, D] queries times the scales of a unit
    float* weights;           // [4, V / v_share, kDecodeKeys]
    int8_t* digits;           // [4, 2, D] of the same, in whole numbers
    uint8_t *codes, *loose;   // [kDecodeKeys, V], [4, V]
};

inline int64_t coded_bytes(const Attention& c) {
    return 4 * (6 * kDecodeKeys * (c.value_dim / W) + 4 * up_to(c.key_dim, kChunk)) + 8 * up_to(c.key_dim, kChunk) +
           (kDecodeKeys + 4) * c.value_dim + 7 * 64;
}

inline CodedScratch coded_scratch_of(const Attention& c, Arena& arena) {
    const int64_t shares = c.value_dim / W;  // at most
    CodedScratch scratch;
    scratch.scale = arena.take<float>(shares * kDecodeKeys);
    scratch.zero = arena.take<float>(shares * kDecodeKeys);
    scratch.scaled = arena.take<float>(4 * up_to(c.key_dim, kChunk));
    scratch.weights = arena.take<float>(4 * shares * kDecodeKeys);
    scratch.digits = arena.take<int8_t>(8 * up_to(c.key_dim, kChunk));
    scratch.codes = arena.take<uint8_t>(kDecodeKeys * c.value_dim);
    scratch.loose = arena.take<uint8_t>(4 * c.value_dim);
    __builtin_memset(scratch.scaled, 0, 4 * up_to(c.key_dim, kChunk) * sizeof(float));
    __builtin_memset(scratch.loose, 0, 4 * c.value_dim);
    return scratch;
}

template <int Odd, int... I> inline Vec every_other(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, 2 * I + Odd...);
}

// N vectors of numbers that take turns become one vector of each.
template <int N> inline void take_apart(Vec* x) {
    if constexpr (N > 1) {
        using Lanes = std::make_integer_sequence<int, W>;
        Vec even[N / 2], odd[N / 2];
        for (int i = 0; i < N / 2; ++i) {
            even[i] = every_other<0>(x[2 * i], x[2 * i + 1], Lanes{});
            odd[i] = every_other<1>(x[2 * i], x[2 * i + 1], Lanes{});
        }
        take_apart<N / 2>(even);
        take_apart<N / 2>(odd);
        for (int i = 0; i < N / 2; ++i) x[2 * i] = even[i], x[2 * i + 1] = odd[i];
    }
}

// [count, shares] to [shares, kDecodeKeys].
template <int Shares> inline int64_t by_scale(const BFloat16* from, int64_t count, float* to) {
    int64_t j = 0;
    for (; j + W <= count; j += W) {
        Vec x[Shares];
        for (int i = 0; i < Shares; ++i) x[i] = load(from + j * Shares + i * W);
        take_apart<Shares>(x);
        for (int i = 0; i < Shares; ++i) store_any(to + i * kDecodeKeys + j, x[i]);
    }
    return j;
}
inline void by_scale(const BFloat16* from, int64_t shares, int64_t count, float* to) {
    int64_t j = 0;
    if (shares == 1) j = by_scale<1>(from, count, to);
    if (shares == 2) j = by_scale<2>(from, count, to);
    if (shares == 4) j = by_scale<4>(from, count, to);
    if (shares == 8) j = by_scale<8>(from, count, to);
    for (; j < count; ++j)
        for (int64_t i = 0; i < shares; ++i) to[i * kDecodeKeys + j] = to_float(from[j * shares + i]);
}

// A block of keys of a coded segment: its spans, and the scales of its values, by the columns that share one.
struct CodedBlock {
    Span spans[kMostSpans];
    Unit next[kMostSpans];    // where what comes a block later lies
    int count;
    int64_t shares;
    bool finite;              // all scales and zeros
};

inline CodedBlock coded_block_of(const Attention& c, const Rows& rows, const Keys& keys, const CodedScratch& scratch) {
    const Coding& g = keys.segment->coding;
    CodedBlock block;
    block.count = 0;
    block.shares = c.value_dim / g.v_share;
    block.finite = true;
    over_units(rows, *keys.segment, keys.start, keys.length, [&](const Span& span) {
        const int64_t later = keys.start + span.at + kDecodeKeys, last = keys.segment->length - 1;
        block.next[block.count] = unit_of(rows, *keys.segment, later < last ? later : last);
        block.spans[block.count++] = span;
        const int64_t of = span.first * block.shares, n = span.count * block.shares;
        block.finite &= is_finite(span.unit.k_scale, c.key_dim) && is_finite(span.unit.k_zero, c.key_dim) &&
                        is_finite(span.unit.v_scale + of, n) && is_finite(span.unit.v_zero + of, n);
        by_scale(span.unit.v_scale + of, block.shares, span.count, scratch.scale + span.at);
        by_scale(span.unit.v_zero + of, block.shares, span.count, scratch.zero + span.at);
    });
    for (int64_t i = 0; i < block.shares; ++i)
        for (int64_t j = keys.length; j < up_to(keys.length, W); ++j)
            scratch.scale[i * kDecodeKeys + j] = scratch.zero[i * kDecodeKeys + j] = 0.0f;
    return block;
}

// For rows of `width` codes, each of which has a byte: in 4 bits two rows read the same bytes. Units follow each
// other in memory; at the end of a page what follows may be another head's, which only wastes the prefetch.
inline Ask ask_for_codes(int64_t count, int64_t width) { return {kAllKeys, look_ahead_here.bytes / width + 1, count, 0}; }

// Products of M rows with the keys of a block.
template <int M>
void coded_dots(const Attention& c, const Coding& g, const CodedBlock& block, const float* q,
                float* scaled, float* s) {
    const int64_t D = c.key_dim;
    for (int n = 0; n < block.count; ++n) {
        const Span& span = block.spans[n];
        Vec starts[M] = {};
        for (int64_t d = 0; d < D; d += W) {
            const Vec scale = load(span.unit.k_scale + d), zero = load(span.unit.k_zero + d);
            PH_UNROLL(8) for (int m = 0; m < M; ++m) {
                const Vec x = load(q + m * D + d);
                store_any(scaled + m * D + d, x * scale);
                starts[m] += x * zero;
            }
        }
        over_rows(span.unit.k, g.k_bits, g.group, D, span.first, span.count,
                  [&](const auto* codes, int64_t count, int64_t offset) {
            dots_of_block<M>(scaled, D, codes, D, count, s + span.at + offset, kDecodeKeys,
                             ask_for_codes(count, D));
        });
        for (int m = 0; m < M; ++m) {
            const float start = sum(starts[m]);
            for (int64_t j = span.at; j < span.at + span.count; ++j) s[m * kDecodeKeys + j] += start;
        }
    }
}

// values[m] = factor[m] · values[m] + Σ_j s[m, j] zero[j], and weights[m] = s[m] · scale.
template <int M>
void coded_weights(const Attention& c, const CodedBlock& block, int64_t v_share, const CodedScratch& scratch,
                   const float* s, int64_t padded, float* values, const float* factors) {
    for (int m = 0; m < M; ++m)
        for (int64_t i = 0; i < block.shares; ++i) {
            Vec all{};
            for (int64_t j = 0; j < padded; j += W) {
                const Vec weight = load(s + m * kDecodeKeys + j);
                all += weight * load(scratch.zero + i * kDecodeKeys + j);
                store_any(scratch.weights + (m * block.shares + i) * kDecodeKeys + j,
                          weight * load(scratch.scale + i * kDecodeKeys + j));
            }
            const float start = sum(all);
            float* to = values + m * c.value_dim + i * v_share;
            for (int64_t d = 0; d < v_share; d += W) store_any(to + d, load(to + d) * factors[m] + start);
        }
}

// values[m] += Σ_j weights[m, j] code_j.
template <int M>
void coded_sums(const Attention& c, const Coding& g, const CodedBlock& block, const float* weights, float* values) {
    constexpr float ones[4] = {1, 1, 1, 1};
    const int64_t V = c.value_dim, stride = block.shares * kDecodeKeys;
    for (int n = 0; n < block.count; ++n) {
        const Span& span = block.spans[n];
        over_rows(span.unit.v, g.v_bits, g.group, V, span.first, span.count,
                  [&](const auto* codes, int64_t count, int64_t offset) {
            const float* s = weights + span.at + offset;
            const Ask ask = ask_for_codes(count, V);
            for (int64_t begin = 0; begin < V; begin += g.v_share, s += kDecodeKeys) {
                int64_t d = begin;
                for (; d + 2 * W <= begin + g.v_share; d += 2 * W)
                    weighted_sum<M, 2>(s, stride, codes + d, V, count, values + d, V, ones, ask);
                if (d < begin + g.v_share)
                    weighted_sum<M, 1>(s, stride, codes + d, V, count, values + d, V, ones, ask);
            }
        });
    }
}

}  // namespace polyhead::PH_NAMESPACE
