// Blocks of files of Hugging Face: numbers of 16 bits, and codes whose scales lie in another tensor. Codes are handed
// theirs, d[0], and what stands for zero, d[1]: a number is (code - zero) * scale, rounded once.
#pragma once

#include "formats.h"

namespace polyhead::PH_NAMESPACE {

template <class T> struct Numbers {
    const uint8_t* at;
    explicit Numbers(const uint8_t* p) : at(p) {}
    void unit(int, Vec* to) const {
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = load((const T*)at + v * W);
    }
};
struct F16 : SizeOf_F16, Numbers<Half> { using Numbers::Numbers; };
struct BF16 : SizeOf_BF16, Numbers<BFloat16> { using Numbers::Numbers; };

// e4m3 without infinities: 1 bit of sign, 4 of the exponent, 3 more. All seven bits but the sign set: no number.
inline Vec float8(VecInt code) {
    const VecInt size = code & 127;
    const Vec small = as_floats(size) * 0x1p-9f;  // subnormal: below 2^-6
    const Vec found = choose((VecInt)(size < 8), small, (Vec)((size << 20) + (120 << 23)));
    return (Vec)((VecInt)choose((VecInt)(size == 127), splat(__builtin_nanf("")), found) | code >> 7 << 31);
}

struct F8_E4M3 : SizeOf_F8_E4M3 {
    const uint8_t* at;
    float d;
    F8_E4M3(const uint8_t* p, const float* d) : at(p), d(*d) {}
    void unit(int, Vec* to) const {
#if defined(__AVX512BW__) && defined(__AVX512VL__) && PH_WIDTH == 16
        // As halves they are 2^8 too small: a conversion that reads subnormal ones at full speed.
        const __m256i codes = load_any<__m256i>(at);
        if (__builtin_expect(!_mm256_cmpeq_epi8_mask(codes | _mm256_set1_epi8(-128), _mm256_set1_epi8(-1)), 1)) {
            const __m512i halves = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7) & _mm512_set1_epi16((short)0xbf80);
            to[0] = (Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * (d * 0x1p8f);
            to[1] = (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * (d * 0x1p8f);
            return;
        }
#endif
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = float8(load_bytes(at + v * W)) * d;
    }
};

template <VecInt (*Load)(const uint8_t*)> struct Codes8 {
    const uint8_t* at;
    float d, zero;
    Codes8(const uint8_t* p, const float* d) : at(p), d(d[0]), zero(d[1]) {}
    void unit(int, Vec* to) const {
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = (as_floats(Load(at + v * W)) - zero) * d;
    }
};
struct I8 : SizeOf_I8, Codes8<load_signed_bytes> {
    static constexpr bool kSigned = true;
    using Codes8::Codes8;
};
struct U8 : SizeOf_U8, Codes8<load_bytes> {
    static constexpr int kMiddle = 128;
    using Codes8::Codes8;
};

// Two codes that lie next to each other share a byte, the first in its low half.
struct U4 : SizeOf_U4 {
    static constexpr int kMiddle = 8;
    const uint8_t* at;
#if defined(__AVX512F__) && PH_WIDTH == 16
    Vec table;
    U4(const uint8_t* p, const float* d) : at(p), table((as_floats(counted()) - d[1]) * d[0]) {}
    void unit(int, Vec* to) const {
        const VecInt all = (VecInt)_mm512_broadcast_i32x4(load_any<__m128i>(at)), each = (counted() & 7) * 4, half = counted() >> 3;
        PH_UNROLL(2) for (int v = 0; v < 2; ++v) {
            const VecInt words = (VecInt)_mm512_permutexvar_epi32((__m512i)(half + 2 * v), (__m512i)all);
            to[v] = (Vec)_mm512_permutexvar_ps((__m512i)(words >> each), (__m512)table);
        }
    }
#else
    float d, zero;
    U4(const uint8_t* p, const float* d) : at(p), d(d[0]), zero(d[1]) {}
    void unit(int, Vec* to) const {
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) {
            const VecInt word = splat_int(load_any<int32_t>(at + v * W / 8 * 4));
            to[v] = (as_floats(word >> (counted() + v * W % 8) * 4 & 15) - zero) * d;
        }
    }
#endif
};

inline float scale_at(const Scales& s, int64_t i) {
    const uint8_t* at = (const uint8_t*)s.scales;  // anywhere in a file
    if (s.dtype == kFloat32) return load_any<float>(at + 4 * i);
    return s.dtype == kBFloat16 ? to_float(load_any<BFloat16>(at + 2 * i)) : half_at(at + 2 * i);
}

}  // namespace polyhead::PH_NAMESPACE
