// Prefill: a block of keys transposed, a block of values packed, then products on register tiles.
#pragma once

#include "prefill_tiles.h"

namespace polyhead::PH_NAMESPACE {

constexpr int64_t kWaitsForMemory = 96;  // with more rows a block is computed far longer than it is read

template <class T> inline int64_t prefill_bytes(const Attention& c, const Plan& p) {
#if PH_TILES
    if (is_tiled(c)) return tiled_bytes<T>(c, p);
#endif
    return 4 * (p.rows * c.key_dim + kPrefillKeys * (3 * c.key_dim + 2 * c.value_dim + p.width) +
                2 * kTileRows<typename Element<T>::type> * kPrefillKeys) + 16 * 64;
}

template <class T, class E, class Next>
void prefill_block(const Attention& c, const Plan& p, const Rows& rows, const Keys& keys, Visible visible,
                const E* q, const E* k, const E* v, float* s, Pair* weights, State& state,
                Next after_k, Next after_v) {
    constexpr bool pairs = !__is_same(E, float);
    const int64_t steps = steps_of(c.key_dim, pairs);
    float factors[kTileRows<E>];
    for (int64_t i = 0; i < rows.count; i += kTileRows<E>) {
        const Strip strip = strip_of<E>(c, rows, i, keys, visible);
        const Keys& seen = strip.keys;
        if (!seen.length) continue;
        const int64_t count = strip.count, from = strip.from, padded = strip.to - from;
        block_product<E>(count, q + i * steps, steps, k + from, kPrefillKeys, steps, s, kPrefillKeys,
                         padded / W, nullptr, after_k);
        for (int64_t m = 0; m < count; ++m)
            factors[m] = weigh(c, rows, i + m, seen, visible, s + m * kPrefillKeys, padded, state);
        float* values = state.values + i * p.width;
#if PH_PAIRS
        if constexpr (pairs) {
            for (int64_t m = 0; m < count; ++m)
                pack_weights(s + m * kPrefillKeys, padded, weights + m * kPrefillKeys / 2);
            block_product<Pair>(count, weights, kPrefillKeys / 2, v + from / 2 * p.width, p.width,
                                steps_of(seen.length, true), values, p.width, p.width / W, factors, after_v);
            continue;
        }
#endif
        if constexpr (!pairs)
            block_product<float>(count, s, kPrefillKeys, v + from * p.width, p.width, seen.length,
                                 values, p.width, p.width / W, factors, after_v);
    }
}

template <class T>
void prefill_rows(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, State& state, Arena arena) {
#if PH_TILES
    if (is_tiled(c)) return prefill_tiles<T>(c, p, rows, from, to, state, arena);
#endif
    using E = typename Element<T>::type;
    constexpr bool pairs = !__is_same(E, float);
    const int64_t D = c.key_dim, steps = steps_of(D, pairs);
    E* q = arena.take<E>(p.rows * steps);
    E* k = arena.take<E>(kPrefillKeys * steps);
    E* v = arena.take<E>(kPrefillKeys * p.width);
    float* s = arena.take<float>(kTileRows<E> * kPrefillKeys);
    Pair* weights = arena.take<Pair>(kTileRows<E> * kPrefillKeys / 2);
    float* good_k = arena.take<float>(kPrefillKeys * D);
    float* good_v = arena.take<float>(kPrefillKeys * c.value_dim);
    for (int64_t i = 0; i < rows.count; ++i) pack_query(query<T>(c, rows, i), D, q + i * steps);
    T* scratch = arena.take<T>(kPrefillKeys * (D + c.value_dim));
    const bool masked = c.low || c.keep;
    [[maybe_unused]] const TilesInUse tiles;
    auto block = [&](const Keys& keys, Visible visible, Content<T> from) {
        if (masked && !all_finite<T>(c, keys, from))
            from = without_nonfinite<T>(c, rows, keys, from, good_k, good_v, state);
        transpose(from.k, from.k_token, keys.length, D, k);
        pack_values(from.v, from.v_token, keys.length, c.value_dim, p.width, v);
        if (rows.count > kWaitsForMemory) {
            prefill_block<T, E>(c, p, rows, keys, visible, q, k, v, s, weights, state, Nothing{}, Nothing{});
            return;
        }
        prefill_block<T, E>(c, p, rows, keys, visible, q, k, v, s, weights, state,
                         NextBlock(from.k + kPrefillKeys * from.k_token, from.k_token * sizeof(T), kPrefillKeys, D * sizeof(T)),
                         NextBlock(from.v + kPrefillKeys * from.v_token, from.v_token * sizeof(T), kPrefillKeys,
                                   c.value_dim * sizeof(T)));
    };
    if (c.chosen) return over_chosen<T>(c, rows, from, to, kPrefillKeys, scratch, block);
    over_keys<T>(c, p, rows, from, to, kPrefillKeys, scratch, block);
}

}  // namespace polyhead::PH_NAMESPACE
