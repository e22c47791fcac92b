// Sums across lanes, pairs of bfloat16 and transposes, in registers.
#pragma once

#include "vector.h"

namespace polyhead::PH_NAMESPACE {

// Sums, or maxima, across lanes of W vectors at once: lane i of the result is that of vector i. Halves are
// exchanged and joined log2 W times, one operation and two shuffles for each vector that goes away.
struct Added {
    Vec operator()(Vec a, Vec b) const { return a + b; }
};
struct Larger {
    Vec operator()(Vec a, Vec b) const { return larger(a, b); }
};
template <int H, int Upper> constexpr int lane_of(int i) {
    const int inside = i % (2 * H), block = i - inside;
    return (inside < H ? block + inside : W + block + inside - H) + (Upper ? H : 0);
}
template <int H, int Upper, int... I>
inline Vec halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, lane_of<H, Upper>(I)...);
}
template <int H, class Join = Added> inline Vec joined_halves(Vec a, Vec b) {
    using Lanes = std::make_integer_sequence<int, W>;
    return Join{}(halves<H, 0>(a, b, Lanes{}), halves<H, 1>(a, b, Lanes{}));
}
// GCC decides by the size of the whole file whether to inline it; a call stores and loads all W vectors.
template <int H, class Join = Added> [[gnu::always_inline]] inline Vec fold(const Vec* v) {
    if constexpr (H == 0) {
        return v[0];
    } else {
        Vec next[H];
        PH_UNROLL(8) for (int i = 0; i < H; ++i) next[i] = joined_halves<H, Join>(v[i], v[i + H]);
        return fold<H / 2, Join>(next);
    }
}

// Two neighbouring bfloat16 columns as one 32-bit element; their products are added in float32.
struct Pair { uint32_t bits; };

#if defined(__AVX512BF16__) && PH_WIDTH == 16
#define PH_PAIRS 1
inline Vec multiply_add_pairs(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// 2 W numbers as pairs, rounded to nearest even.
inline Vec pairs_of(Vec a, Vec b) { return (Vec)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }
inline Vec pairs_of(const float* s) { return pairs_of(load(s), load(s + W)); }
// W numbers, rounded likewise, as the lower halves of 32 bits.
inline VecInt bits_of(const float* s) {
    return __builtin_convertvector((VecHalf)_mm512_cvtneps_pbh((__m512)load(s)), VecInt);
}
// Pairs of 2 W columns of two rows; `low` and `high` hold them in another order, which columns_of undoes.
inline void interleave(const BFloat16* a, const BFloat16* b, Vec& low, Vec& high) {
    const __m512i x = load_any<__m512i>(a), y = b ? load_any<__m512i>(b) : __m512i{};
    low = (Vec)_mm512_unpacklo_epi16(x, y), high = (Vec)_mm512_unpackhi_epi16(x, y);
}
inline void columns_of(Vec low, Vec high, Vec& left, Vec& right) {
    left = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    right = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && PH_WIDTH == 4
#define PH_PAIRS 1
inline Vec multiply_add_pairs(Vec sum, Vec a, Vec b) {
    return (Vec)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)a), vreinterpretq_bf16_f32((float32x4_t)b));
}
inline Vec pairs_of(const float* s) {
    const bfloat16x8_t first = vcvtq_low_bf16_f32((float32x4_t)load(s));
    return (Vec)vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(first, (float32x4_t)load(s + W)));
}
inline VecInt bits_of(const float* s) {
    return (VecInt)vmovl_u16(vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)load(s))));
}
inline void interleave(const BFloat16* a, const BFloat16* b, Vec& low, Vec& high) {
    const uint16x8_t x = load_any<uint16x8_t>(a), y = b ? load_any<uint16x8_t>(b) : uint16x8_t{};
    low = (Vec)vreinterpretq_f32_u16(vzip1q_u16(x, y)), high = (Vec)vreinterpretq_f32_u16(vzip2q_u16(x, y));
}
inline void columns_of(Vec low, Vec high, Vec& left, Vec& right) { left = low, right = high; }
#else
#define PH_PAIRS 0
inline Vec multiply_add_pairs(Vec sum, Vec, Vec) { return sum; }
#endif

#if PH_PAIRS
// Weights of one row as pairs of keys.
inline void pack_weights(const float* s, int64_t count, Pair* to) {
    for (int64_t j = 0; j < count; j += 2 * W) store_any(to + j / 2, pairs_of(s + j));
}
#endif

template <class E> inline Vec multiply_add_of(Vec sum, Vec a, Vec b) {
    if constexpr (sizeof(E) == 4 && !__is_same(E, float)) return multiply_add_pairs(sum, a, b);
    else return multiply_add(sum, a, b);
}

inline Vec broadcast(const float* p) { return splat(*p); }
inline Vec broadcast(const Pair* p) { return (Vec)splat_int((int32_t)p->bits); }
inline Vec load_elements(const float* p) { return load_any<Vec>(p); }
inline Vec load_elements(const Pair* p) { return load_any<Vec>(p); }

// Rows become columns.
template <int H> inline void transpose_step(Vec* rows) {
    using Lanes = std::make_integer_sequence<int, W>;
    PH_UNROLL(16) for (int i = 0; i < W; ++i)
        if ((i & H) == 0) {
            const Vec a = rows[i], b = rows[i + H];
            rows[i] = halves<H, 0>(a, b, Lanes{});
            rows[i + H] = halves<H, 1>(a, b, Lanes{});
        }
    if constexpr (H > 1) transpose_step<H / 2>(rows);
}
inline void transpose_in_registers(Vec* rows) { transpose_step<W / 2>(rows); }

}  // namespace polyhead::PH_NAMESPACE
