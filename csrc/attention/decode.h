// Decode: a block of keys and values after the other, as numbers or as codes, where they lie.
#pragma once

#include "chosen.h"
#include "decode_int8.h"

namespace polyhead::PH_NAMESPACE {

// The queries of a block of rows, [rows, key_dim] as float32 and as what `dots` multiplies.
struct Queries {
    float* plain;
    const char* rows;   // plain, or as they are given where those are pairs
    int64_t row_bytes;
    char* lanes;        // 32 bits of each row side by side, if they are multiplied so; or null
};

// Whether rows are lanes of the first product: those of a token are more than half a vector. How a row is computed
// must not depend on how many tokens there are.
template <class T> inline bool in_lanes(const Rows& rows, int64_t key_dim) {
    if constexpr (PH_WIDTH != 16 || (!kPairs<T> && !__is_same(T, float))) return false;
    return rows.count > W / 2 * (rows.t1 - rows.t0) && key_dim % (kPairs<T> ? 2 * W : W) == 0;
}

template <class T> Queries queries_of(const Attention& c, const Rows& rows, Arena& arena) {
    const int64_t D = c.key_dim;
    const bool pairs = kPairs<T> && D % (2 * W) == 0;
    float* plain = arena.take<float>(kDecodeRows * D);
    T* stored = arena.take<T>(kDecodeRows * D);
    for (int64_t i = 0; i < rows.count; ++i) {
        const T* x = query<T>(c, rows, i);
        for (int64_t d = 0; d < D; ++d) {
            stored[i * D + d] = x[d];
            plain[i * D + d] = to_float(x[d]);
        }
    }
    Queries q{plain, pairs ? (const char*)stored : (const char*)plain, D * (pairs ? (int64_t)sizeof(T) : 4), nullptr};
    if (in_lanes<T>(rows, D)) {
        q.lanes = arena.take<char>(kDecodeRows * q.row_bytes);
        __builtin_memset(q.lanes, 0, kDecodeRows * q.row_bytes);
        for (int64_t i = 0; i < rows.count; ++i)
            for (int64_t at = 0; at < q.row_bytes; at += 4)
                __builtin_memcpy(q.lanes + at * kDecodeRows + i * 4, q.rows + i * q.row_bytes + at, 4);
    }
    return q;
}

// The first product, rows of kDecodeKeys.
template <class T>
void decode_dots(const Attention& c, const Rows& rows, const Queries& q, int64_t length, const Content<T>& from, float* s) {
#if PH_WIDTH == 16
    if (q.lanes) {
        using E = std::conditional_t<kPairs<T>, Pair, float>;
        constexpr int64_t kBytes = sizeof(T);
        const Ask ask = ask_for<T>(0, 1, length, c.key_dim, from.k_token * kBytes, from.k_ahead * kBytes);
        return dots_in_lanes((const E*)q.lanes, q.row_bytes / 4, from.k, from.k_token * kBytes, length, s, ask);
    }
#endif
    four_at_a_time(rows.count, [&](int64_t i, auto count) {
        const Ask ask = ask_for<T>((i + 3) / 4, (rows.count + 3) / 4, length, c.key_dim, from.k_token, from.k_ahead);
        dots_of_block<count, T>(q.rows + i * q.row_bytes, c.key_dim, from.k, from.k_token, length, s + i * kDecodeKeys, kDecodeKeys, ask);
    });
}

// Keys for all rows, then values for all rows: what the first rows have read is in the first cache for the others.
template <class T>
void decode_block(const Attention& c, const Rows& rows, const Keys& keys, Visible visible, const Queries& q,
               const Content<T>& from, float* s, State& state) {
    const bool pairs = kPairs<T> && c.value_dim % (2 * W) == 0;
    const int64_t padded = up_to(keys.length, pairs ? 2 * W : W);
    float factors[kDecodeRows];
    decode_dots<T>(c, rows, q, keys.length, from, s);
    for (int64_t i = 0; i < rows.count; ++i)
        factors[i] = weigh(c, rows, i, keys, visible, s + i * kDecodeKeys, padded, state);
    four_at_a_time(rows.count, [&](int64_t i, auto count) {
        constexpr int M = count;
        Ask ask = ask_for<T>((i + 3) / 4, (rows.count + 3) / 4, keys.length, c.value_dim, from.v_token, from.v_ahead);
        if ((const void*)from.v == (const void*)from.k) ask.keys = 0;  // a latent is prefetched once
        const float* weights = s + i * kDecodeKeys;
        float* values = state.values + i * c.value_dim;
#if PH_PAIRS
        if constexpr (kPairs<T>)
            if (pairs)
                return weighted_sums_of_pairs<M>(weights, kDecodeKeys, from.v, from.v_token, keys.length, values, c.value_dim, factors + i, ask);
#endif
        weighted_sums<M, T>(weights, kDecodeKeys, from.v, from.v_token, keys.length, values, c.value_dim, factors + i, ask);
    });
}

// A block of decode, if its codes can be read as they are: false for a latent, whose value has the
// scales of its key, for scales shared by less than a vector of columns, and for scales that are not
// finite.
template <class T>
bool decode_coded_block(const Attention& c, const Rows& rows, const Keys& keys, Visible visible,
                     const float* q, const CodedScratch& scratch, float* s, State& state) {
    const Coding& g = keys.segment->coding;
    if (!g.group || !g.v_bits || g.v_share % W) return false;
    const CodedBlock block = coded_block_of(c, rows, keys, scratch);
    if (!block.finite) return false;
    const int64_t padded = up_to(keys.length, W);
#if PH_BYTES
    const bool integers = kInBytes<T> && g.v_share % kColumns == 0 && c.key_dim <= kMostKeySize;
    if (integers) interleave(c, g, block, keys.length, scratch);
#endif
    four_at_a_time(rows.count, [&](int64_t i, auto count) {
        constexpr int M = count;
#if PH_BYTES
        if (integers) {
            integer_dots_of_block<M>(c, g, block, q + i * c.key_dim, scratch, s);
            float factors[M], *values = state.values + i * c.value_dim;
            for (int m = 0; m < M; ++m)
                factors[m] = weigh(c, rows, i + m, keys, visible, s + m * kDecodeKeys, padded, state);
            integer_sums<M>(c, g, keys.length, scratch, s, values, factors);
            return;
        }
#endif
        coded_dots<M>(c, g, block, q + i * c.key_dim, scratch.scaled, s);
        float factors[M];
        for (int m = 0; m < M; ++m)
            factors[m] = weigh(c, rows, i + m, keys, visible, s + m * kDecodeKeys, padded, state);
        float* values = state.values + i * c.value_dim;
        coded_weights<M>(c, block, g.v_share, scratch, s, padded, values, factors);
        coded_sums<M>(c, g, block, scratch.weights, values);
    });
    return true;
}

inline int64_t decode_bytes(const Attention& c) {
    return kDecodeRows * c.key_dim * 4 * 3 + kDecodeRows * kDecodeKeys * 4 +
           2 * kDecodeKeys * (c.key_dim + c.value_dim) * 4 + 10 * 64 + coded_bytes(c);
}

template <class T>
void decode_rows(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, State& state, Arena arena) {
    const Queries q = queries_of<T>(c, rows, arena);
    float* s = arena.take<float>(kDecodeRows * kDecodeKeys);
    float* good_k = arena.take<float>(kDecodeKeys * c.key_dim);
    float* good_v = arena.take<float>(kDecodeKeys * c.value_dim);
    T* scratch = arena.take<T>(kDecodeKeys * (c.key_dim + c.value_dim));
    const bool masked = c.low || c.keep;
    const CodedScratch coded = coded_scratch_of(c, arena);
    auto block = [&](const Keys& keys, Visible visible, const Content<T>& from) {
        if (masked && !all_finite<T>(c, keys, from)) {
            // In its own type: what a row does not see must not change its bits.
            const Content<T> good = without_nonfinite<T>(c, rows, keys, from, good_k, good_v, state);
            decode_block<T>(c, rows, keys, visible, q, good, s, state);
            return;
        }
        decode_block<T>(c, rows, keys, visible, q, from, s, state);
    };
    if (c.chosen) return over_chosen<T>(c, rows, from, to, kDecodeKeys, scratch, block);
    if (p.contiguous) return over_contiguous<T>(c, p, rows, from, to, kDecodeKeys, scratch, block);
    over_blocks(c, rows, from, to, kDecodeKeys, [&](const Keys& keys, Visible visible) {
        if (decode_coded_block<T>(c, rows, keys, visible, q.plain, coded, s, state)) return;
        block(keys, visible, content_of<T>(c, rows, *keys.segment, keys.start, keys.length, scratch));
    });
}

}  // namespace polyhead::PH_NAMESPACE
