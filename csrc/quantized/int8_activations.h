// Products of weights in blocks with x in 8 bits: an option that is off by default.
//
//     x_k ≈ s_u q_k,  s_u = max |x| / 127 of unit u of 32 numbers          Σ_k w_k x_k ≈ Σ_u s_u (d_u Σ code q + m_u Σ q)
//
// Sums of a unit are whole numbers, exact in any order; units are added up in the order of K, everywhere alike. So a
// row of x gets the same bits alone, beside others and in a prompt (int8_gemm.h).
//
// A unit that is not finite makes sums NaN. Source: Q8_0 and Q8_1 of llama.cpp (there scales are rounded to 16 bits).
#pragma once

#include <cstddef>

#include "products.h"

namespace polyhead::PH_NAMESPACE {

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef int32_t LaneInts __attribute__((vector_size(32)));
typedef uint8_t HalfBytes __attribute__((vector_size(16)));
typedef uint16_t HalfPairs __attribute__((vector_size(16)));

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

// 32 bytes from the halves of 16.
inline Bytes nibbles(const uint8_t* p) {
    const HalfBytes x = load_any<HalfBytes>(p), high = (HalfBytes)((HalfPairs)x >> 4);
#if defined(__AVX2__)
    return (Bytes)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)x), (__m128i)high, 1) & 15;
#else
    Bytes both;
    __builtin_memcpy(&both, &x, 16), __builtin_memcpy((uint8_t*)&both + 16, &high, 16);
    return both & 15;
#endif
}

// 16 where a bit is set.
inline Bytes fifth_bits(uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (Bytes)_mm256_maskz_set1_epi8(bits, 16);
#else
    Bytes found;
    for (int i = 0; i < 32; ++i) found[i] = (uint8_t)((bits >> i & 1) << 4);
    return found;
#endif
}

// The codes of a unit, from 0 on and kMiddle too large, or whole numbers of either sign; and what they stand for:
// scale · (code − kMiddle) + minimum. kHalved: sixteen numbers have a scale, not 32.
template <class B> struct Whole;

template <int Middle, bool Minimum, bool Signed = false> struct WholeWithHalves {
    static constexpr int kMiddle = Middle;
    static constexpr bool kMinimum = Minimum, kSigned = Signed, kHalved = false;
    const uint8_t* at;
    const float* d;
    float scale(int, int) const { return d[0]; }
    float minimum(int) const { return d[1]; }
};

template <> struct Whole<Q4_0> : WholeWithHalves<8, false> {
    Bytes codes(int) const { return nibbles(at + 2); }
};
template <> struct Whole<Q4_1> : WholeWithHalves<0, true> {
    Bytes codes(int) const { return nibbles(at + 4); }
};
template <> struct Whole<Q5_0> : WholeWithHalves<16, false> {
    Bytes codes(int) const { return nibbles(at + 6) | fifth_bits(load_any<uint32_t>(at + 2)); }
};
template <> struct Whole<Q5_1> : WholeWithHalves<0, true> {
    Bytes codes(int) const { return nibbles(at + 8) | fifth_bits(load_any<uint32_t>(at + 4)); }
};
template <> struct Whole<Q8_0> : WholeWithHalves<0, false, true> {
    Bytes codes(int) const { return load_any<Bytes>(at + 2); }
};

struct WholeWithMinima {
    static constexpr int kMiddle = 0;
    static constexpr bool kMinimum = true, kSigned = false, kHalved = false;
    const uint8_t* at;
    SixBits by;
    WholeWithMinima(const uint8_t* p, const float*) : at(p), by(p + 4, half_at(p), half_at(p + 2)) {}
    float scale(int j, int) const { return by.scale(j); }
    float minimum(int j) const { return -by.minimum(j); }
    // The lower bits of unit j, of two that share bytes.
    static Bytes low(const uint8_t* p, int j) {
        typedef uint16_t Pairs __attribute__((vector_size(32)));
        return (Bytes)(load_any<Pairs>(p + j / 2 * 32) >> 4 * (j % 2)) & 15;
    }
};
template <> struct Whole<Q4_K> : WholeWithMinima {
    using WholeWithMinima::WholeWithMinima;
    Bytes codes(int j) const { return low(at + 16, j); }
};
template <> struct Whole<Q5_K> : WholeWithMinima {
    using WholeWithMinima::WholeWithMinima;
    Bytes codes(int j) const { return low(at + 48, j) | (load_any<Bytes>(at + 16) >> j & 1) << 4; }
};
template <> struct Whole<Q6_K> {
    static constexpr int kMiddle = 32;
    static constexpr bool kMinimum = false, kSigned = false, kHalved = true;
    const uint8_t* at;
    float d;
    Whole(const uint8_t* p, const float*) : at(p), d(half_at(p + 208)) {}
    float scale(int j, int half) const { return d * (float)((const int8_t*)at)[192 + 2 * j + half]; }
    float minimum(int) const { return 0.0f; }
    Bytes codes(int j) const {
        const Bytes low = load_any<Bytes>(at + j / 4 * 64 + j % 2 * 32), bits = load_any<Bytes>(at + 128 + j / 4 * 32);
        return (low >> 4 * (j / 2 % 2) & 15) | (bits >> 2 * (j % 4) & 3) << 4;
    }
};

// Row r of R rows of blocks, whose halves have been read.
template <class B, int R> inline Whole<B> whole_at(const uint8_t* w, const float* halves, int r) {
    if constexpr (B::kHalves) return Whole<B>{{w, halves + r * B::kHalves}};
    else return Whole<B>(w, nullptr);
}

template <class Of> inline void with_whole(int type, const Of& of) {
#define PH_IF(B, number) if (type == number) return of(Tag<B>{});
    PH_IF(Q4_0, 2) PH_IF(Q4_1, 3) PH_IF(Q5_0, 6) PH_IF(Q5_1, 7) PH_IF(Q8_0, 8) PH_IF(Q4_K, 12) PH_IF(Q5_K, 13) PH_IF(Q6_K, 14)
#undef PH_IF
}

// A unit of x: codes, their sums in lanes times −(what codes of weights are too large by), s, and s Σ q.
struct Int8Unit {
    Bytes codes;
    LaneInts start;
    float scale, total;
};

// Codes as `quad_dots` takes them: with VNNI those of either sign are 128 too large.
template <class B> inline Bytes unsigned_codes(Bytes codes) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if (Whole<B>::kSigned) codes ^= 128;
#endif
    return codes;
}

// sum + Σ of four codes each, times those of x.
template <class B, class Ints> inline Ints quad_dots(Ints sum, Ints codes, Ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if constexpr (sizeof(Ints) == 64) return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
    else return (Ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(__AVX2__)
    // Of 7 bits two products fit in 16: 2 · 127 · 128 at most.
    PH_UNROLL(2) for (size_t i = 0; i < sizeof(Ints); i += 32) {
        __m256i a, b, found;
        __builtin_memcpy(&a, (const char*)&codes + i, 32), __builtin_memcpy(&b, (const char*)&x + i, 32), __builtin_memcpy(&found, (const char*)&sum + i, 32);
        if (Whole<B>::kSigned) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
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
        const int code = Whole<B>::kSigned ? ((const int8_t*)&codes)[i] : ((const uint8_t*)&codes)[i];
        sum[i / 4] += code * ((const int8_t*)&x)[i];
    }
    return sum;
#endif
}

// What `quad_dots` starts with, times the sums of four codes of x.
template <class B> constexpr int start_of() {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if (Whole<B>::kSigned) return -128;
#endif
    return -Whole<B>::kMiddle;
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
