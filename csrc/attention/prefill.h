// Prefill: a block of keys transposed, a block of values packed, then products on register tiles.
//
// With bfloat16 pairs (two neighbouring columns in 32 bits) the products are done by the processor's
// own bfloat16 instruction, which adds in float32; otherwise everything is widened to float32.
#pragma once

#include "chosen.h"
#include "../common/tile_products.h"

namespace polyhead::PH_NAMESPACE {

template <class T> struct Element { using type = float; };
#if PH_PAIRS
template <> struct Element<BFloat16> { using type = Pair; };
#endif

constexpr int64_t kWaitsForMemory = 96;  // with more rows a block is computed far longer than it is read

inline int64_t steps_of(int64_t n, bool pairs) { return pairs ? (n + 1) / 2 : n; }

// [length, D] to [D, width], whole vectors, 0 beyond length.
template <class T>
void transpose(const T* k, int64_t stride, int64_t length, int64_t D, float* to, int64_t width = kPrefillKeys) {
    for (int64_t j = 0; j < width; j += W) {
        int64_t d = 0;
        for (; d + W <= D; d += W) {
            Vec rows[W];
            for (int n = 0; n < W; ++n)
                rows[n] = j + n < length ? load(k + (j + n) * stride + d) : Vec{};
            transpose_in_registers(rows);
            for (int n = 0; n < W; ++n) store_any(to + (d + n) * width + j, rows[n]);
        }
        for (; d < D; ++d)
            for (int n = 0; n < W; ++n)
                to[d * width + j + n] = j + n < length ? to_float(k[(j + n) * stride + d]) : 0.0f;
    }
}

template <class T>
void pack_values(const T* v, int64_t stride, int64_t length, int64_t V, int64_t width, float* to) {
    for (int64_t j = 0; j < length; ++j) {
        int64_t d = 0;
        for (; d + W <= V; d += W) store_any(to + j * width + d, load(v + j * stride + d));
        for (; d < V; ++d) to[j * width + d] = to_float(v[j * stride + d]);
        for (; d < width; ++d) to[j * width + d] = 0.0f;
    }
}

#if PH_PAIRS
// [length, D] to pairs [D / 2, width].
inline void transpose(const BFloat16* k, int64_t stride, int64_t length, int64_t D, Pair* to, int64_t width = kPrefillKeys) {
    for (int64_t j = 0; j < width; j += W) {
        int64_t d = 0;
        for (; d + 2 * W <= D; d += 2 * W) {
            Vec rows[W];
            for (int n = 0; n < W; ++n)
                rows[n] = j + n < length ? load_any<Vec>(k + (j + n) * stride + d) : Vec{};
            transpose_in_registers(rows);
            for (int n = 0; n < W; ++n) store_any(to + (d / 2 + n) * width + j, rows[n]);
        }
        for (; d < D; d += 2)
            for (int n = 0; n < W; ++n) {
                const BFloat16* x = k + (j + n) * stride + d;
                const bool here = j + n < length;
                const uint32_t low = here ? x[0].bits : 0, high = here && d + 1 < D ? x[1].bits : 0;
                to[d / 2 * width + j + n].bits = low | high << 16;
            }
    }
}

// [length, V] to pairs of keys [length / 2, width].
inline void pack_values(const BFloat16* v, int64_t stride, int64_t length, int64_t V, int64_t width, Pair* to) {
    for (int64_t j = 0; j < length; j += 2) {
        const BFloat16 *a = v + j * stride, *b = j + 1 < length ? a + stride : nullptr;
        Pair* row = to + j / 2 * width;
        int64_t d = 0;
        for (; d + W <= V; d += W) {
            const VecInt low = __builtin_convertvector(load_any<VecHalf>(a + d), VecInt);
            const VecInt high = b ? __builtin_convertvector(load_any<VecHalf>(b + d), VecInt) : VecInt{};
            store_any(row + d, low | high << 16);
        }
        for (; d < width; ++d) {
            const uint32_t low = d < V ? a[d].bits : 0, high = b && d < V ? b[d].bits : 0;
            row[d].bits = low | high << 16;
        }
    }
}

inline void pack_query(const BFloat16* q, int64_t D, Pair* to) {
    for (int64_t d = 0; d < D; d += 2) {
        const uint32_t high = d + 1 < D ? q[d + 1].bits : 0;
        to[d / 2].bits = q[d].bits | high << 16;
    }
}
#endif
template <class T> inline void pack_query(const T* q, int64_t D, float* to) {
    for (int64_t d = 0; d < D; ++d) to[d] = to_float(q[d]);
}

template <class T> inline int64_t prefill_bytes(const Attention& c, const Plan& p) {
    return 4 * (p.rows * c.key_dim + kPrefillKeys * (3 * c.key_dim + 2 * c.value_dim + p.width) +
                2 * kTileRows<typename Element<T>::type> * kPrefillKeys) + 16 * 64;
}

// The part of a block of keys that any of `count` rows from i on sees, widened to whole vectors.
inline Keys seen_of(const Attention& c, const Rows& rows, int64_t i, int64_t count, const Keys& keys) {
    const int64_t first = first_query(c, rows, c.bounds_batch, 1);
    int64_t low = c.low[first + rows.token(i)], high = low;
    for (int64_t m = 0; m < count; ++m) {
        const int64_t at = first + rows.token(i + m);
        low = c.low[at] < low ? c.low[at] : low;
        high = c.high[at] > high ? c.high[at] : high;
    }
    int64_t from = difference(low, keys.first), to = difference(high, keys.first);
    from = clamped(from, keys.length) / (2 * W) * (2 * W);
    to = to > keys.length ? keys.length : to;
    Keys part = keys;
    part.start += from, part.index += from, part.first += from;
    part.absent = from ? 0 : keys.absent;  // which are fewer than 2 W
    part.length = to > from ? to - from : 0;
    return part;
}

// Rows of a block from `row` on that are multiplied together, and where the keys that any of them sees
// begin and end in a block of keys, in whole vectors. All others have weight 0.
struct Strip {
    int64_t row, count, from, to;
    Keys keys;
};

template <class E>
Strip strip_of(const Attention& c, const Rows& rows, int64_t row, const Keys& keys, Visible visible) {
    const int64_t count = rows.count - row < kTileRows<E> ? rows.count - row : kTileRows<E>;
    const bool trim = visible == Visible::some && c.low && !keys.positions;
    const Keys seen = trim ? seen_of(c, rows, row, count, keys) : keys;
    const int64_t from = seen.start - keys.start;
    return {row, count, from, from + up_to(seen.length, __is_same(E, float) ? W : 2 * W), seen};
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
