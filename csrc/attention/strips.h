// Blocks of keys transposed, blocks of values packed, and strips of rows that are multiplied with them.
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
    if (D % 2) to[D / 2].bits = 0;
    __builtin_memcpy(to, q, D * sizeof(BFloat16));
}
#endif
template <class T> inline void pack_query(const T* q, int64_t D, float* to) {
    for (int64_t d = 0; d < D; d += W) store_some(load_some(q + d, D - d), to + d, D - d);
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

}  // namespace polyhead::PH_NAMESPACE
