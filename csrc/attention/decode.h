// Few rows: a block of keys and values after the other, as numbers or as codes, where they lie.
#pragma once

#include "contiguous.h"
#include "decode_int8.h"

namespace polyhead::PH_NAMESPACE {

template <int M, class T>
void few_step(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, Visible visible,
              const void* q, const Content<T>& from, float* s, State& state) {
    const bool pairs = kPairs<T> && c.value_dim % (2 * W) == 0;
    const int64_t padded = up_to(keys.length, pairs ? 2 * W : W);
    const uint64_t asked = share_to_ask((i + 3) / 4, (rows.count + 3) / 4);
    dots_of_block<M, T>(q, c.key_dim, from.k, from.k_token, keys.length, s, kFewKeys, asked);
    const uint64_t asked_of_values = (const void*)from.v == (const void*)from.k ? 0 : asked;  // a latent is prefetched once
    float factors[M];
    for (int m = 0; m < M; ++m)
        factors[m] = weigh(c, rows, i + m, keys, visible, s + m * kFewKeys, padded, state);
    float* values = state.values + i * c.value_dim;
#if PH_PAIRS
    if constexpr (kPairs<T>)
        if (pairs)
            return weighted_sums_of_pairs<M>(s, kFewKeys, from.v, from.v_token, keys.length, values, c.value_dim, factors, asked_of_values);
#endif
    weighted_sums<M, T>(s, kFewKeys, from.v, from.v_token, keys.length, values, c.value_dim, factors, asked_of_values);
}

template <class T>
void few_block(const Attention& c, const Rows& rows, const Keys& keys, Visible visible, const char* q,
               int64_t row_bytes, const Content<T>& from, float* s, State& state) {
    four_at_a_time(rows.count, [&](int64_t i, auto count) {
        few_step<count, T>(c, rows, i, keys, visible, q + i * row_bytes, from, s, state);
    });
}

// A block of few rows, if its codes can be read as they are: false for a latent, whose value has the
// scales of its key, for scales shared by less than a vector of columns, and for scales that are not
// finite.
template <class T>
bool few_coded_block(const Attention& c, const Rows& rows, const Keys& keys, Visible visible,
                     const float* q, const CodedRoom& room, float* s, State& state) {
    const Coding& g = keys.piece->coding;
    if (!g.group || !g.v_bits || g.v_share % W) return false;
    const CodedBlock block = coded_block_of(c, rows, keys, room);
    if (!block.finite) return false;
    const int64_t padded = up_to(keys.length, W);
#if PH_BYTES
    const bool integers = kInBytes<T> && g.v_share % kColumns == 0 && c.key_dim <= kMostKeySize;
    if (integers) interleave(c, g, block, keys.length, room);
#endif
    four_at_a_time(rows.count, [&](int64_t i, auto count) {
        constexpr int M = count;
#if PH_BYTES
        if (integers) {
            integer_dots_of_block<M>(c, g, block, q + i * c.key_dim, room, s);
            float factors[M], *values = state.values + i * c.value_dim;
            for (int m = 0; m < M; ++m)
                factors[m] = weigh(c, rows, i + m, keys, visible, s + m * kFewKeys, padded, state);
            integer_sums<M>(c, g, keys.length, room, s, values, factors);
            return;
        }
#endif
        coded_dots<M>(c, g, block, q + i * c.key_dim, room.scaled, s);
        float factors[M];
        for (int m = 0; m < M; ++m)
            factors[m] = weigh(c, rows, i + m, keys, visible, s + m * kFewKeys, padded, state);
        float* values = state.values + i * c.value_dim;
        coded_weights<M>(c, block, g.v_share, room, s, padded, values, factors);
        coded_sums<M>(c, g, block, room.weights, values);
    });
    return true;
}

inline int64_t few_bytes(const Attention& c) {
    return kFewRows * c.key_dim * 4 * 2 + 4 * kFewKeys * 4 +
           2 * kFewKeys * (c.key_dim + c.value_dim) * 4 + 9 * 64 + coded_bytes(c);
}

template <class T>
void few_rows(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, State& state, Arena arena) {
    const int64_t D = c.key_dim;
    const bool pairs = kPairs<T> && D % (2 * W) == 0;
    float* plain = arena.take<float>(kFewRows * D);
    T* stored = arena.take<T>(kFewRows * D);
    float* s = arena.take<float>(4 * kFewKeys);
    float* good_k = arena.take<float>(kFewKeys * D);
    float* good_v = arena.take<float>(kFewKeys * c.value_dim);
    for (int64_t i = 0; i < rows.count; ++i) {
        const T* x = query<T>(c, rows, i);
        for (int64_t d = 0; d < D; ++d) {
            stored[i * D + d] = x[d];
            plain[i * D + d] = to_float(x[d]);
        }
    }
    const char* q = pairs ? (const char*)stored : (const char*)plain;
    const int64_t row_bytes = D * (pairs ? (int64_t)sizeof(T) : 4);
    T* room = arena.take<T>(kFewKeys * (D + c.value_dim));
    const bool watch = c.low || c.keep;
    const CodedRoom coded = coded_room_of(c, arena);
    auto block = [&](const Keys& keys, Visible visible, const Content<T>& from) {
        if (watch && !all_finite<T>(c, keys, from)) {
            // In its own type: what a row does not see must not change its bits.
            const Content<T> good = quarantined<T>(c, rows, keys, from, good_k, good_v, state);
            few_block<T>(c, rows, keys, visible, q, row_bytes, good, s, state);
            return;
        }
        few_block<T>(c, rows, keys, visible, q, row_bytes, from, s, state);
    };
    if (p.joined) return over_joined<T>(c, p, rows, from, to, kFewKeys, room, block);
    over_blocks(c, rows, from, to, kFewKeys, [&](const Keys& keys, Visible visible) {
        if (few_coded_block<T>(c, rows, keys, visible, plain, coded, s, state)) return;
        block(keys, visible, content_of<T>(c, rows, *keys.piece, keys.start, keys.length, room));
    });
}

}  // namespace polyhead::PH_NAMESPACE
