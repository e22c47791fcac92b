// Products of weights in blocks with x in 8 bits: an option that is off by default.
//
//     x_k ≈ s_u q_k,  s_u = max |x| / 127 of unit u of 32 numbers          Σ_k w_k x_k ≈ Σ_u s_u (d_u Σ code q + m_u Σ q)
//
// Sums of a unit are whole numbers, exact in any order; units are added up in the order of K, everywhere alike. So a
// row of x gets the same bits alone, beside others and in a prompt (int8_gemm.h).
//
// A unit that is not finite makes sums NaN. Source: Q8_0 and Q8_1 of llama.cpp (there scales are rounded to 16 bits).
#pragma once

#include <array>
#include <cstddef>

#include "products.h"

namespace polyhead::PH_NAMESPACE {

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef int32_t LaneInts __attribute__((vector_size(32)));

inline Four add_product(Four sum, Four a, Four b) {
#if defined(__FMA__)
    return (Four)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)sum);
#else
    return sum + a * b;
#endif
}

// Of four units, what their first sixteen numbers give and what the others give.
inline void sums_of(const LaneInts* v, FourInts& first, FourInts& second) {
#if defined(__AVX2__)
    const __m256i a = _mm256_hadd_epi32((__m256i)v[0], (__m256i)v[1]), b = _mm256_hadd_epi32((__m256i)v[2], (__m256i)v[3]);
    const __m256i all = _mm256_hadd_epi32(a, b);
    first = (FourInts)_mm256_castsi256_si128(all), second = (FourInts)_mm256_extracti128_si256(all, 1);
#else
    for (int i = 0; i < 4; ++i)
        first[i] = v[i][0] + v[i][1] + v[i][2] + v[i][3], second[i] = v[i][4] + v[i][5] + v[i][6] + v[i][7];
#endif
}

// 16 where a bit is set.
inline Bytes fifth_bits(uint32_t bits) { return where_set(bits) & 16; }

// What kernels know of the codes of a unit: they are whole numbers of either sign, or from 0 on and `Middle` too large; a
// number is scale · (code − Middle) + minimum. Scales and minima of a unit are as many: one, or one for sixteen numbers.
template <int Middle, int Scales, int Minima, bool Signed = false> struct CodesOf {
    static constexpr int kMiddle = Middle, kScales = Scales, kMinima = Minima;
    static constexpr bool kSigned = Signed;
    // What `quad_dots` starts with, times the sums of four codes of x.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    static constexpr int kStart = Signed ? -128 : -Middle;
#else
    static constexpr int kStart = -Middle;
#endif
};

// Blocks by units of whole numbers: codes(j), scale(j, half) and minimum(j, half) of unit j.
template <class B> struct Whole : B {
    using Form = CodesOf<0, B::kHalved ? 2 : 1, 0, true>;
    Whole(const uint8_t* p, const float*) : B(p) {}
    float minimum(int, int) const { return 0.0f; }
};
template <class B> using FormOf = typename Whole<B>::Form;

template <int Middle, int Minima, bool Signed = false> struct WholeWithHalves {
    using Form = CodesOf<Middle, 1, Minima, Signed>;
    const uint8_t* at;
    const float* d;
    float scale(int, int) const { return d[0]; }
    float minimum(int, int) const { return d[1]; }
};

template <> struct Whole<Q4_0> : WholeWithHalves<8, 0> {
    Bytes codes(int) const { return nibbles(at + 2); }
};
template <> struct Whole<Q4_1> : WholeWithHalves<0, 1> {
    Bytes codes(int) const { return nibbles(at + 4); }
};
template <> struct Whole<Q5_0> : WholeWithHalves<16, 0> {
    Bytes codes(int) const { return nibbles(at + 6) | fifth_bits(load_any<uint32_t>(at + 2)); }
};
template <> struct Whole<Q5_1> : WholeWithHalves<0, 1> {
    Bytes codes(int) const { return nibbles(at + 8) | fifth_bits(load_any<uint32_t>(at + 4)); }
};
template <> struct Whole<Q8_0> : WholeWithHalves<0, 0, true> {
    Bytes codes(int) const { return load_any<Bytes>(at + 2); }
};

// Codes of two bits times scales of four are whole numbers below 46.
template <> struct Whole<Q2_K> : Q2_K {
    using Form = CodesOf<0, 1, 2>;
    Whole(const uint8_t* p, const float*) : Q2_K(p) {}
    float scale(int, int) const { return d; }
    Bytes codes(int j) const {
        auto multiples = [&](int half) { return four_times(0x03020100u * (at[2 * j + half] & 15)); };
        return looked_up(joined(multiples(0), multiples(1)), two_bits(at + 16, j));
    }
};
template <> struct Whole<Q3_K> : Q3_K {
    using Form = CodesOf<4, 2, 0>;
    Whole(const uint8_t* p, const float*) : Q3_K(p) {}
    float minimum(int, int) const { return 0.0f; }
    Bytes codes(int j) const { return raised(j); }
};

struct WholeWithMinima {
    using Form = CodesOf<0, 1, 1>;
    const uint8_t* at;
    SixBits by;
    WholeWithMinima(const uint8_t* p, const float*) : at(p), by(p + 4, half_at(p), half_at(p + 2)) {}
    float scale(int j, int) const { return by.scale(j); }
    float minimum(int j, int) const { return -by.minimum(j); }
    // The lower bits of unit j, of two that share bytes.
    static Bytes low(const uint8_t* p, int j) { return bits_of(load_any<Bytes>(p + j / 2 * 32), 4 * (j % 2), 4); }
};
template <> struct Whole<Q4_K> : WholeWithMinima {
    using WholeWithMinima::WholeWithMinima;
    Bytes codes(int j) const { return low(at + 16, j); }
};
template <> struct Whole<Q5_K> : WholeWithMinima {
    using WholeWithMinima::WholeWithMinima;
    Bytes codes(int j) const { return low(at + 48, j) | bits_of(load_any<Bytes>(at + 16), j, 1) << 4; }
};
template <> struct Whole<Q6_K> {
    using Form = CodesOf<32, 2, 0>;
    const uint8_t* at;
    float d;
    Whole(const uint8_t* p, const float*) : at(p), d(half_at(p + 208)) {}
    float scale(int j, int half) const { return d * (float)((const int8_t*)at)[192 + 2 * j + half]; }
    float minimum(int, int) const { return 0.0f; }
    Bytes codes(int j) const {
        const Bytes low = load_any<Bytes>(at + j / 4 * 64 + j % 2 * 32);
        return bits_of(low, 4 * (j / 2 % 2), 4) | two_bits(at + 128, j) << 4;
    }
};

// Codes whose scale and zero lie in another tensor. Those of 8 bits are of either sign.
template <int Middle, bool Signed> struct WholeWithZero {
    using Form = CodesOf<0, 1, 1, Signed>;
    const uint8_t* at;
    const float* d;
    float scale(int, int) const { return d[0]; }
    float minimum(int, int) const { return ((float)Middle - d[1]) * d[0]; }
};
template <> struct Whole<I8> : WholeWithZero<0, true> {
    Bytes codes(int) const { return load_any<Bytes>(at); }
};
template <> struct Whole<U8> : WholeWithZero<128, true> {
    Bytes codes(int) const { return load_any<Bytes>(at) ^ 128; }
};
template <> struct Whole<U4> : WholeWithZero<0, false> {
    Bytes codes(int) const {
        const HalfBytes low = load_any<HalfBytes>(at) & 15, high = (HalfBytes)((HalfPairs)load_any<HalfBytes>(at) >> 4) & 15;
        return joined(__builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                      __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
};

template <class B> inline Whole<B> whole_at(const uint8_t* w, const float* given) {
    if constexpr (B::kHalves || B::kScaled) return Whole<B>{{w, given}};
    else return Whole<B>(w, nullptr);
}
template <class B, class Rows, int... R> inline std::array<Whole<B>, sizeof...(R)> wholes_of(const Rows& row, const float* given, std::integer_sequence<int, R...>) {
    return {whole_at<B>(row(R), given + R * Given<B, 1>::kEach)...};
}
// Blocks of R rows, row r at row(r), and what they are given.
template <class B, int R, class Rows> inline std::array<Whole<B>, R> wholes_at(const Rows& row, const float* given) {
    return wholes_of<B>(row, given, std::make_integer_sequence<int, R>{});
}

// What `of` returns for the type's blocks.
template <class Of> inline auto with_whole(int type, const Of& of) {
    switch (type) {
#define PH_CASE(B, number, numbers, bytes) case number: if constexpr (takes_int8_activations(number)) return of(Tag<B>{}); else break;
        PH_BLOCKS(PH_CASE)
#undef PH_CASE
    }
    __builtin_unreachable();  // arguments are checked
}

// A unit of x: codes, their sums in lanes times −(what codes of weights are too large by), s, and s Σ q.
struct Int8Unit {
    Bytes codes;
    LaneInts start;
    float scale, total;
};

// Codes as `quad_dots` takes them: with VNNI those of either sign are 128 too large.
template <class F> inline Bytes unsigned_codes(Bytes codes) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if (F::kSigned) codes ^= 128;
#endif
    return codes;
}

// sum + Σ of four codes each, times those of x.
template <class F, class Ints> inline Ints quad_dots(Ints sum, Ints codes, Ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if constexpr (sizeof(Ints) == 64) return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
    else return (Ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(__AVX2__)
    // Of 7 bits two products fit in 16: 2 · 127 · 128 at most.
    PH_UNROLL(2) for (size_t i = 0; i < sizeof(Ints); i += 32) {
        __m256i a, b, found;
        __builtin_memcpy(&a, (const char*)&codes + i, 32), __builtin_memcpy(&b, (const char*)&x + i, 32), __builtin_memcpy(&found, (const char*)&sum + i, 32);
        if (F::kSigned) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
        found = _mm256_add_epi32(found, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
        __builtin_memcpy((char*)&sum + i, &found, 32);
    }
    return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
    PH_UNROLL(2) for (size_t i = 0; i < sizeof(Ints); i += 16) {  // codes of 7 bits are signed bytes too
        const int8x16_t a = load_any<int8x16_t>((const char*)&codes + i), b = load_any<int8x16_t>((const char*)&x + i);
        store_any((char*)&sum + i, vdotq_s32(load_any<int32x4_t>((const char*)&sum + i), a, b));
    }
    return sum;
#else
    for (size_t i = 0; i < sizeof(Ints); ++i) {
        const int code = F::kSigned ? ((const int8_t*)&codes)[i] : ((const uint8_t*)&codes)[i];
        sum[i / 4] += code * ((const int8_t*)&x)[i];
    }
    return sum;
#endif
}

// Sums of four codes each that lie next to each other.
inline LaneInts sums_of_four(Bytes x) {
#if defined(__AVX2__)
    return (LaneInts)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), (__m256i)x), _mm256_set1_epi16(1));
#else
    LaneInts found{};
    for (int i = 0; i < 32; ++i) found[i / 4] += (int8_t)x[i];
    return found;
#endif
}

inline Int8Unit int8_unit_of(const float* x, int start) {
    Vec most{}, all{};
    for (int v = 0; v < kVectors; ++v) {
        const Vec size = larger(load(x + v * W), -load(x + v * W));
        most = larger(most, size), all += load(x + v * W) * 0.0f;
    }
    Int8Unit made{};
    const float top = largest(most);
    if (sum(all) != 0.0f) made.scale = made.total = __builtin_nanf("");  // something is infinite or NaN
    else if (top > 1e-30f) {
        const float by = 127.0f / top;
        typedef uint8_t Codes __attribute__((vector_size(W)));
        Codes codes[kVectors];
        for (int v = 0; v < kVectors; ++v)  // adding 1.5 · 2^23 rounds to a whole number
            codes[v] = __builtin_convertvector((VecInt)multiply_add(splat(12582912.0f), load(x + v * W), splat(by)) - 0x4b400000, Codes);
#if PH_WIDTH == 16
        made.codes = (Bytes)_mm256_set_m128i((__m128i)codes[1], (__m128i)codes[0]);  // in registers
#else
        __builtin_memcpy(&made.codes, codes, sizeof made.codes);
#endif
        const LaneInts fours = sums_of_four(made.codes);
        int total = 0;
        for (int i = 0; i < 8; ++i) total += fours[i];
        made.start = fours * start;
        made.scale = top / 127.0f, made.total = made.scale * (float)total;
    }
    return made;
}

}  // namespace polyhead::PH_NAMESPACE
