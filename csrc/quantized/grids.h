// Blocks whose codes are places in a grid: an entry stands for eight or four numbers at once.
#pragma once

#include "formats.h"

namespace polyhead::PH_NAMESPACE {

// A code of eight numbers is eight bytes; a unit has four.
struct Codes {
    uint64_t eights[4];
    // Those of vector v.
    VecInt operator()(int v) const {
#if defined(__AVX512F__) && PH_WIDTH == 16
        return (VecInt)_mm512_cvtepi8_epi32(_mm_set_epi64x((int64_t)eights[2 * v + 1], (int64_t)eights[2 * v]));
#elif defined(__AVX2__) && PH_WIDTH == 8
        return (VecInt)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)eights[v]));
#else
        return load_signed_bytes((const uint8_t*)eights + v * W);
#endif
    }
};

inline uint64_t eight_of(int64_t grid, uint32_t entry) { return load_any<uint64_t>(grids + grid + 8 * entry); }
inline uint64_t four_of(int64_t grid, uint32_t entry) { return load_any<uint32_t>(grids + grid + 4 * entry); }

// −1 in the lanes whose bits are set, of those of vector v.
inline VecInt where_set(uint32_t bits, int v) { return -((splat_int((int32_t)bits) >> (counted() + v * W)) & 1); }

struct Signed {
    Codes codes;
    uint32_t signs;
    VecInt operator()(int v) const {
        const VecInt negative = where_set(signs, v);
        return (codes(v) ^ negative) - negative;
    }
};

// The signs of eight numbers in 7 bits: an even number of them is negative.
inline uint32_t eight_signs(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }
inline uint32_t signs_of(uint32_t sevens) {
    return eight_signs(sevens & 127) | eight_signs(sevens >> 7 & 127) << 8 | eight_signs(sevens >> 14 & 127) << 16 |
           eight_signs(sevens >> 21 & 127) << 24;
}

struct IQ2_XXS : SizeOf_IQ2_XXS {
    const uint8_t* at;
    float d;
    explicit IQ2_XXS(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    void unit(int j, Vec* to) const {
        const uint8_t* q = at + 8 * j;
        const uint32_t rest = load_any<uint32_t>(q + 4);
        const float scale = d * (0.5f + (float)(rest >> 28)) * 0.25f;
        Codes codes;
        for (int i = 0; i < 4; ++i) codes.eights[i] = eight_of(kGridOf2XXS, q[i]);
        in_runs(Signed{codes, signs_of(rest)}, scale, scale, to);
    }
};

struct IQ2_XS : SizeOf_IQ2_XS {
    const uint8_t* at;
    float d;
    explicit IQ2_XS(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    void unit(int j, Vec* to) const {
        Signed of{{}, 0};
        for (int i = 0; i < 4; ++i) {
            const uint32_t q = load_any<uint16_t>(at + 8 * j + 2 * i);
            of.codes.eights[i] = eight_of(kGridOf2XS, q & 511), of.signs |= eight_signs(q >> 9) << 8 * i;
        }
        const uint8_t scales = at[64 + j];
        in_runs(of, d * (0.5f + (float)(scales & 15)) * 0.25f, d * (0.5f + (float)(scales >> 4)) * 0.25f, to);
    }
};

struct IQ2_S : SizeOf_IQ2_S {
    const uint8_t* at;
    float d;
    explicit IQ2_S(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    void unit(int j, Vec* to) const {
        Codes codes;
        for (int i = 0; i < 4; ++i) codes.eights[i] = eight_of(kGridOf2S, at[4 * j + i] | (at[64 + j] >> 2 * i & 3) << 8);
        const uint8_t scales = at[72 + j];
        in_runs(Signed{codes, load_any<uint32_t>(at + 32 + 4 * j)}, d * (0.5f + (float)(scales & 15)) * 0.25f,
                d * (0.5f + (float)(scales >> 4)) * 0.25f, to);
    }
};

struct IQ3_XXS : SizeOf_IQ3_XXS {
    const uint8_t* at;
    float d;
    explicit IQ3_XXS(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    void unit(int j, Vec* to) const {
        const uint8_t* q = at + 8 * j;
        const uint32_t rest = load_any<uint32_t>(at + 64 + 4 * j);
        const float scale = d * (0.5f + (float)(rest >> 28)) * 0.5f;
        Codes codes;
        for (int i = 0; i < 4; ++i) codes.eights[i] = four_of(kGridOf3XXS, q[2 * i]) | four_of(kGridOf3XXS, q[2 * i + 1]) << 32;
        in_runs(Signed{codes, signs_of(rest)}, scale, scale, to);
    }
};

struct IQ3_S : SizeOf_IQ3_S {
    const uint8_t* at;
    float d;
    explicit IQ3_S(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    uint64_t four(int j, int i) const { return four_of(kGridOf3S, at[8 * j + i] | (at[64 + j] >> i & 1) << 8); }
    void unit(int j, Vec* to) const {
        const float scale = d * (float)(1 + 2 * (at[104 + j / 2] >> j % 2 * 4 & 15));
        Codes codes;
        for (int i = 0; i < 4; ++i) codes.eights[i] = four(j, 2 * i) | four(j, 2 * i + 1) << 32;
        in_runs(Signed{codes, load_any<uint32_t>(at + 72 + 4 * j)}, scale, scale, to);
    }
};

// Codes −1, 0, 1 plus or minus an eighth: here eight times as much.
struct Shifted {
    Codes codes;
    uint32_t down;  // bits of the numbers that are an eighth less
    VecInt operator()(int v) const { return codes(v) * 8 + 1 + 2 * where_set(down, v); }
};

struct IQ1_S : SizeOf_IQ1_S {
    const uint8_t* at;
    float d;
    explicit IQ1_S(const uint8_t* p) : at(p + 2), d(half_at(p) * 0.125f) {}
    void unit(int j, Vec* to) const {
        const uint32_t high = load_any<uint16_t>(at + 32 + 2 * j);
        const float scale = d * (float)(2 * (high >> 12 & 7) + 1);
        Codes codes;
        for (int i = 0; i < 4; ++i) codes.eights[i] = eight_of(kGridOf1, at[4 * j + i] | (high >> 3 * i & 7) << 8);
        in_runs(Shifted{codes, high >> 15 ? ~0u : 0}, scale, scale, to);
    }
};

struct IQ1_M : SizeOf_IQ1_M {
    const uint8_t* at;
    float d;
    explicit IQ1_M(const uint8_t* p) : at(p) {
        uint16_t half = 0;  // its digits lie in four places
        for (int i = 0; i < 4; ++i) half |= (uint16_t)(scales(i) >> 12 << 4 * i);
        d = half_at((const uint8_t*)&half) * 0.125f;
    }
    uint32_t scales(int i) const { return load_any<uint16_t>(at + 48 + 2 * i); }
    float scale(int i) const { return d * (float)(2 * (scales(i / 4) >> i % 4 * 3 & 7) + 1); }
    void unit(int j, Vec* to) const {
        Shifted of{{}, 0};
        for (int i = 0; i < 4; ++i) {
            const uint32_t high = at[32 + 2 * j + i / 2] >> i % 2 * 4 & 15;
            of.codes.eights[i] = eight_of(kGridOf1, at[4 * j + i] | (high & 7) << 8);
            if (high & 8) of.down |= 255u << 8 * i;
        }
        in_runs(of, scale(2 * j), scale(2 * j + 1), to);
    }
};

}  // namespace polyhead::PH_NAMESPACE
