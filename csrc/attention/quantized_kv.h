// Keys and values in 8 or 4 bits: where a token's codes lie, and the numbers that they stand for.
#pragma once

#include "scores.h"

namespace polyhead::PH_NAMESPACE {

// Codes as elements of a row: of 8 bits, and the two halves of a byte of 4 bits.
struct Byte { uint8_t bits; };
struct LowHalf { uint8_t bits; };
struct HighHalf { uint8_t bits; };

inline Vec load(const Byte* p) { return __builtin_convertvector(load_bytes(&p->bits), Vec); }
inline Vec load(const LowHalf* p) { return __builtin_convertvector(load_bytes(&p->bits) & 15, Vec); }
inline Vec load(const HighHalf* p) { return __builtin_convertvector(load_bytes(&p->bits) >> 4, Vec); }
inline float to_float(Byte x) { return x.bits; }
inline float to_float(LowHalf x) { return (float)(x.bits & 15); }
inline float to_float(HighHalf x) { return (float)(x.bits >> 4); }

// One unit of a segment, where it lies.
struct Unit {
    const uint8_t *k, *v;
    const BFloat16 *k_scale, *k_zero, *v_scale, *v_zero;
};

inline Unit unit_of(const Rows& rows, const KVSegment& segment, int64_t token) {
    const Coding& g = segment.coding;
    int64_t place = rows.batch, unit = (token + segment.skipped) / g.group;
    if (segment.pages) {
        const int64_t in_page = segment.page_length / g.group;
        place = segment.pages[rows.batch * segment.pages_batch + unit / in_page];
        unit %= in_page;
    }
    const int64_t k = place * segment.k_batch + rows.kv_head * segment.k_head + unit * segment.k_token;
    const int64_t v = place * segment.v_batch + rows.kv_head * segment.v_head + unit * segment.v_token;
    const int64_t key = place * g.k_batch + rows.kv_head * g.k_head + unit * g.k_unit;
    const int64_t value = place * g.v_batch + rows.kv_head * g.v_head + unit * g.v_unit;
    return {(const uint8_t*)segment.k + k,
            (const uint8_t*)segment.v + v,
            (const BFloat16*)g.k_scale + key,
            (const BFloat16*)g.k_zero + key,
            (const BFloat16*)g.v_scale + value,
            (const BFloat16*)g.v_zero + value};
}

// Tokens [first, first + count) of a unit, which are those from `at` on of a block.
struct Span {
    Unit unit;
    int64_t first, count, at;
};

template <class Visit>
inline void over_units(const Rows& rows, const KVSegment& segment, int64_t at, int64_t length, Visit&& visit) {
    const int64_t group = segment.coding.group;
    for (int64_t j = 0; j < length;) {
        const int64_t first = (at + j + segment.skipped) % group;
        const int64_t count = group - first < length - j ? group - first : length - j;
        visit(Span{unit_of(rows, segment, at + j), first, count, j});
        j += count;
    }
}

// Calls `run(codes of the first, count, offset from first)` for tokens that lie row after row.
template <class Run>
inline void over_rows(const uint8_t* codes, int64_t bits, int64_t group, int64_t width, int64_t first,
                      int64_t count, Run&& run) {
    if (bits == 8) {
        run((const Byte*)(codes + first * width), count, (int64_t)0);
        return;
    }
    const int64_t half = group / 2, low = first < half ? (count < half - first ? count : half - first) : 0;
    if (low) run((const LowHalf*)(codes + first * width), low, (int64_t)0);
    if (low < count) run((const HighHalf*)(codes + (first + low - half) * width), count - low, low);
}

// to[j] = zero + scale · code for `count` rows of n columns that share scales, one for each.
template <class T, class E>
void expand_columns(const E* codes, int64_t stride, int64_t count, int64_t n, const BFloat16* scale,
                    const BFloat16* zero, T* to, int64_t to_stride) {
    int64_t d = 0;
    for (; d + W <= n; d += W) {
        const Vec factor = load(scale + d), start = load(zero + d);
        for (int64_t j = 0; j < count; ++j)
            store(start + load(codes + j * stride + d) * factor, to + j * to_stride + d);
    }
    for (; d < n; ++d)
        for (int64_t j = 0; j < count; ++j)
            round_to(to_float(zero[d]) + to_float(codes[j * stride + d]) * to_float(scale[d]), to + j * to_stride + d);
}

// The same for one row of n columns that all share one scale.
template <class T, class E>
void expand_row(const E* codes, int64_t n, float scale, float zero, T* to) {
    int64_t d = 0;
    for (; d + W <= n; d += W) store(zero + load(codes + d) * scale, to + d);
    for (; d < n; ++d) round_to(zero + to_float(codes[d]) * scale, to + d);
}

// Keys [length, D] and values [length, V] of the tokens [at, at + length) of a coded segment, rounded to
// the type of the cache as if they had been decoded before.
template <class T>
void expand(const Attention& c, const Rows& rows, const KVSegment& segment, int64_t at, int64_t length, T* k, T* v) {
    const Coding& g = segment.coding;
    const int64_t shares = c.value_dim / g.v_share;
    over_units(rows, segment, at, length, [&](const Span& span) {
        T* to = k + span.at * c.key_dim;
        over_rows(span.unit.k, g.k_bits, g.group, c.key_dim, span.first, span.count,
                  [&](const auto* codes, int64_t count, int64_t offset) {
            expand_columns(codes, c.key_dim, count, c.key_dim, span.unit.k_scale, span.unit.k_zero,
                           to + offset * c.key_dim, c.key_dim);
        });
        if (!g.v_bits) return;
        over_rows(span.unit.v, g.v_bits, g.group, c.value_dim, span.first, span.count,
                  [&](const auto* codes, int64_t count, int64_t offset) {
            for (int64_t j = 0; j < count; ++j)
                for (int64_t s = 0; s < shares; ++s) {
                    const int64_t of = (span.first + offset + j) * shares + s;
                    expand_row(codes + j * c.value_dim + s * g.v_share, g.v_share,
                               to_float(span.unit.v_scale[of]), to_float(span.unit.v_zero[of]),
                               v + (span.at + offset + j) * c.value_dim + s * g.v_share);
                }
        });
    });
}

}  // namespace polyhead::PH_NAMESPACE
