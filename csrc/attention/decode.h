// Decode: a block of keys and values after the other, as numbers or as codes, where they lie.
#pragma once

#include "chosen.h"
#include "decode_int8.h"

namespace polyhead::PH_NAMESPACE {

template <int M, class T>
void decode_step(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, Visible visible,
              const void* q, const Content<T>& from, float* s, State& state) {
    const bool pairs = kPairs<T> && c.value_dim % (2 * W) == 0;
    const int64_t padded = up_to(keys.length, pairs ? 2 * W : W);
    const uint64_t asked = share_to_ask((i + 3) / 4, (rows.count + 3) / 4);
    dots_of_block<M, T>(q, c.key_dim, from.k, from.k_token, keys.length, s, kDecodeKeys, Ask{asked, from.k_ahead});
    const bool once = (const void*)from.v == (const void*)from.k;  // a latent is prefetched once
    const Ask asked_of_values{once ? 0 : asked, from.v_ahead};
    float factors[M];
    for (int m = 0; m < M; ++m)
        factors[m] = weigh(c, rows, i + m, keys, visible, s + m * kDecodeKeys, padded, state);
    float* values = state.values + i * c.value_dim;
#if PH_PAIRS
    if constexpr (kPairs<T>)
        if (pairs)
            return weighted_sums_of_pairs<M>(s, kDecodeKeys, from.v, from.v_token, keys.length, values, c.value_dim, factors, asked_of_values);
#endif
    weighted_sums<M, T>(s, kDecodeKeys, from.v, from.v_token, keys.length, values, c.value_dim, factors, asked_of_values);
}

template <class T>
void decode_block(const Attention& c, const Rows& rows, const Keys& keys, Visible visible, const char* q,
               int64_t row_bytes, const Content<T>& from, float* s, State& state) {
    four_at_a_time(rows.count, [&](int64_t i, auto count) {
        decode_step<count, T>(c, rows, i, keys, visible, q + i * row_bytes, from, s, state);
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
    return kDecodeRows * c.key_dim * 4 * 2 + 4 * kDecodeKeys * 4 +
           2 * kDecodeKeys * (c.key_dim + c.value_dim) * 4 + 9 * 64 + coded_bytes(c);
}

template <class T>
void decode_rows(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, State& state, Arena arena) {
    const int64_t D = c.key_dim;
    const bool pairs = kPairs<T> && D % (2 * W) == 0;
    float* plain = arena.take<float>(kDecodeRows * D);
    T* stored = arena.take<T>(kDecodeRows * D);
    float* s = arena.take<float>(4 * kDecodeKeys);
    float* good_k = arena.take<float>(kDecodeKeys * D);
    float* good_v = arena.take<float>(kDecodeKeys * c.value_dim);
    for (int64_t i = 0; i < rows.count; ++i) {
        const T* x = query<T>(c, rows, i);
        for (int64_t d = 0; d < D; ++d) {
            stored[i * D + d] = x[d];
            plain[i * D + d] = to_float(x[d]);
        }
    }
    const char* q = pairs ? (const char*)stored : (const char*)plain;
    const int64_t row_bytes = D * (pairs ? (int64_t)sizeof(T) : 4);
    T* scratch = arena.take<T>(kDecodeKeys * (D + c.value_dim));
    const bool masked = c.low || c.keep;
    const CodedScratch coded = coded_scratch_of(c, arena);
    auto block = [&](const Keys& keys, Visible visible, const Content<T>& from) {
        if (masked && !all_finite<T>(c, keys, from)) {
            // In its own type: what a row does not see must not change its bits.
            const Content<T> good = without_nonfinite<T>(c, rows, keys, from, good_k, good_v, state);
            decode_block<T>(c, rows, keys, visible, q, row_bytes, good, s, state);
            return;
        }
        decode_block<T>(c, rows, keys, visible, q, row_bytes, from, s, state);
    };
    if (c.chosen) return over_chosen<T>(c, rows, from, to, kDecodeKeys, scratch, block);
    if (p.contiguous) return over_contiguous<T>(c, p, rows, from, to, kDecodeKeys, scratch, block);
    over_blocks(c, rows, from, to, kDecodeKeys, [&](const Keys& keys, Visible visible) {
        if (decode_coded_block<T>(c, rows, keys, visible, plain, coded, s, state)) return;
        block(keys, visible, content_of<T>(c, rows, *keys.segment, keys.start, keys.length, scratch));
    });
}

}  // namespace polyhead::PH_NAMESPACE
