// Blocks whose codes are places in a grid: an entry stands for eight or four numbers at once.
#pragma once

#include "formats.h"

namespace polyhead::PH_NAMESPACE {

typedef uint64_t Eights __attribute__((vector_size(32)));
inline uint64_t eight_of(int64_t grid, uint32_t entry) { return load_any<uint64_t>(grids + grid + 8 * entry); }
inline uint64_t four_of(int64_t grid, uint32_t entry) { return load_any<uint32_t>(grids + grid + 4 * entry); }

// The codes of a unit from what of(0) to of(3) give, eight each.
template <class Of> inline Bytes from_eights(const Of& of) { return (Bytes)Eights{of(0), of(1), of(2), of(3)}; }

inline Bytes negated(Bytes codes, uint32_t signs) {
    const Bytes negative = where_set(signs);
    return (codes ^ negative) - negative;
}

// The signs of eight numbers are 7 bits of a byte: an even number of them is negative.
inline uint32_t with_last_signs(uint32_t sevens) {
    uint32_t odd = sevens ^ (sevens >> 4 & 0x0f0f0f0f);
    odd ^= odd >> 2, odd ^= odd >> 1;
    return sevens | (odd & 0x01010101) << 7;
}
// Four times 7 bits next to each other.
inline uint32_t signs_of(uint32_t s) {
    return with_last_signs((s & 0x7f) | (s << 1 & 0x7f00) | (s << 2 & 0x7f0000) | (s << 3 & 0x7f000000));
}

struct IQ2_XXS : SizeOf_IQ2_XXS, SignedCodes<IQ2_XXS> {
    const uint8_t* at;
    float d;
    explicit IQ2_XXS(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    uint32_t rest(int j) const { return load_any<uint32_t>(at + 8 * j + 4); }
    float scale(int j, int) const { return d * (0.5f + (float)(rest(j) >> 28)) * 0.25f; }
    Bytes codes(int j) const {
        return negated(from_eights([&](int i) { return eight_of(kGridOf2XXS, at[8 * j + i]); }), signs_of(rest(j)));
    }
};

struct IQ2_XS : SizeOf_IQ2_XS, SignedCodes<IQ2_XS> {
    static constexpr bool kHalved = true;
    const uint8_t* at;
    float d;
    explicit IQ2_XS(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    float scale(int j, int half) const { return d * (0.5f + (float)(at[64 + j] >> 4 * half & 15)) * 0.25f; }
    Bytes codes(int j) const {
        auto place = [&](int i) { return (uint32_t)load_any<uint16_t>(at + 8 * j + 2 * i); };
        const uint32_t sevens = place(0) >> 9 | place(1) >> 9 << 8 | place(2) >> 9 << 16 | place(3) >> 9 << 24;
        return negated(from_eights([&](int i) { return eight_of(kGridOf2XS, place(i) & 511); }), with_last_signs(sevens));
    }
};

struct IQ2_S : SizeOf_IQ2_S, SignedCodes<IQ2_S> {
    static constexpr bool kHalved = true;
    const uint8_t* at;
    float d;
    explicit IQ2_S(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    float scale(int j, int half) const { return d * (0.5f + (float)(at[72 + j] >> 4 * half & 15)) * 0.25f; }
    Bytes codes(int j) const {
        auto eight = [&](int i) { return eight_of(kGridOf2S, at[4 * j + i] | (at[64 + j] >> 2 * i & 3) << 8); };
        return negated(from_eights(eight), load_any<uint32_t>(at + 32 + 4 * j));
    }
};

struct IQ3_XXS : SizeOf_IQ3_XXS, SignedCodes<IQ3_XXS> {
    const uint8_t* at;
    float d;
    explicit IQ3_XXS(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    uint32_t rest(int j) const { return load_any<uint32_t>(at + 64 + 4 * j); }
    float scale(int j, int) const { return d * (0.5f + (float)(rest(j) >> 28)) * 0.5f; }
    Bytes codes(int j) const {
        auto four = [&](int i) { return four_of(kGridOf3XXS, at[8 * j + i]); };
        return negated(from_eights([&](int i) { return four(2 * i) | four(2 * i + 1) << 32; }), signs_of(rest(j)));
    }
};

struct IQ3_S : SizeOf_IQ3_S, SignedCodes<IQ3_S> {
    const uint8_t* at;
    float d;
    explicit IQ3_S(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    float scale(int j, int) const { return d * (float)(1 + 2 * (at[104 + j / 2] >> j % 2 * 4 & 15)); }
    Bytes codes(int j) const {
        auto four = [&](int i) { return four_of(kGridOf3S, at[8 * j + i] | (at[64 + j] >> i & 1) << 8); };
        return negated(from_eights([&](int i) { return four(2 * i) | four(2 * i + 1) << 32; }), load_any<uint32_t>(at + 72 + 4 * j));
    }
};

// Codes −1, 0, 1 plus an eighth, or minus where a bit is set: here eight times as much.
inline Bytes shifted(Bytes codes, uint32_t down) { return codes * 8 + 1 + (where_set(down) & 254); }

struct IQ1_S : SizeOf_IQ1_S, SignedCodes<IQ1_S> {
    const uint8_t* at;
    float d;
    explicit IQ1_S(const uint8_t* p) : at(p + 2), d(half_at(p) * 0.125f) {}
    uint32_t high(int j) const { return load_any<uint16_t>(at + 32 + 2 * j); }
    float scale(int j, int) const { return d * (float)(2 * (high(j) >> 12 & 7) + 1); }
    Bytes codes(int j) const {
        auto eight = [&](int i) { return eight_of(kGridOf1, at[4 * j + i] | (high(j) >> 3 * i & 7) << 8); };
        return shifted(from_eights(eight), high(j) >> 15 ? ~0u : 0);
    }
};

struct IQ1_M : SizeOf_IQ1_M, SignedCodes<IQ1_M> {
    static constexpr bool kHalved = true;
    const uint8_t* at;
    float d;
    explicit IQ1_M(const uint8_t* p) : at(p) {
        uint16_t half = 0;  // its digits lie in four places
        for (int i = 0; i < 4; ++i) half |= (uint16_t)(scales(i) >> 12 << 4 * i);
        d = half_at((const uint8_t*)&half) * 0.125f;
    }
    uint32_t scales(int i) const { return load_any<uint16_t>(at + 48 + 2 * i); }
    float scale(int j, int half) const { return d * (float)(2 * (scales(j / 2) >> (2 * j + half) % 4 * 3 & 7) + 1); }
    Bytes codes(int j) const {
        auto high = [&](int i) -> uint32_t { return at[32 + 2 * j + i / 2] >> i % 2 * 4 & 15; };
        auto down = [&](int i) { return (high(i) >> 3) * 255 << 8 * i; };
        return shifted(from_eights([&](int i) { return eight_of(kGridOf1, at[4 * j + i] | (high(i) & 7) << 8); }), down(0) | down(1) | down(2) | down(3));
    }
};

}  // namespace polyhead::PH_NAMESPACE
