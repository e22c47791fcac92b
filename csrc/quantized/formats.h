// Weights as GGUF files hold them: rows of blocks of 32 or 256 numbers, each a code of a few bits, with
// what scales them. A block gives its numbers 32 at a time, as vectors.
// Scales in 16 bits that stand at the beginning of a block are handed to it: those of several rows become
// float32 at once. kGiven units are made together where they share bytes.
//
// The numbers are those of the gguf package's unpacking, bit for bit: a code times its scale has at most 24
// bits, so only the last addition rounds, and it does not matter whether it is one instruction with the product.
// A product adds them in the order of dot_rows: its results are those of the same numbers in float32.
#pragma once

#include "../common/vector.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

#define PH_SIZE(name, number, numbers, bytes) \
    struct SizeOf_##name { \
        static constexpr int kNumbers = numbers, kBytes = bytes, kHalves = 0, kGiven = 1, kMiddle = 0; \
        static constexpr bool kScaled = number >= kFirstScaled, kSigned = false; \
    };
PH_BLOCKS(PH_SIZE)
#undef PH_SIZE

constexpr int64_t kUnit = 32;
constexpr int kVectors = kUnit / W;  // of a unit

inline float half_at(const uint8_t* p) {
#if defined(__F16C__)
    return _cvtsh_ss(load_any<uint16_t>(p));
#else
    return to_float(load_any<Half>(p));
#endif
}

template <class Of, int... I> inline void each(const Of& of, std::integer_sequence<int, I...>) {
    (of(std::integral_constant<int, I>{}), ...);
}

// The first N halves of blocks of R rows as float32, those of a row next to each other.
template <int N, int R> inline void halves_of(const uint8_t* p, int64_t row_bytes, float* to) {
#if defined(__F16C__)
    if constexpr (N * R == 8 || N * R == 4) {
        __m128i all = _mm_setzero_si128();
        auto put = [&](auto r) {
            if constexpr (N == 2) all = _mm_insert_epi32(all, load_any<int32_t>(p + r * row_bytes), decltype(r)::value);
            else all = _mm_insert_epi16(all, load_any<int16_t>(p + r * row_bytes), decltype(r)::value);
        };
        each(put, std::make_integer_sequence<int, R>{});
        if constexpr (N * R == 8) _mm256_storeu_ps(to, _mm256_cvtph_ps(all));
        else _mm_storeu_ps(to, _mm_cvtph_ps(all));
        asm volatile("" : "+m"(*(float(*)[N * R])to));  // loads spread a number over a vector for nothing, shuffles do not
        return;
    }
#endif
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) to[r * N + i] = half_at(p + r * row_bytes + 2 * i);
}

inline Vec as_floats(VecInt x) { return __builtin_convertvector(x, Vec); }

// d · code + m for codes of 4 bits, of which the lowest bits of x count.
struct Affine {
#if defined(__AVX512F__) && PH_WIDTH == 16
    Vec table;
    Affine(float d, float m) : table(as_floats(counted()) * d + m) {}
    Vec operator()(VecInt x) const { return (Vec)_mm512_permutexvar_ps((__m512i)x, (__m512)table); }
#else
    float d, m;
    Affine(float d, float m) : d(d), m(m) {}
    Vec operator()(VecInt x) const { return as_floats(x & 15) * d + m; }
#endif
};

// The same where codes stand for 16 numbers that lie on no line.
struct Lookup {
    const float* table;
    float d;
    Vec operator()(VecInt x) const {
#if defined(__AVX512F__) && PH_WIDTH == 16
        return (Vec)_mm512_permutexvar_ps((__m512i)x, (__m512)load(table)) * d;
#else
        Vec found;
        for (int i = 0; i < W; ++i) found[i] = table[x[i] & 15];
        return found * d;
#endif
    }
};

constexpr float kCurved[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kMicro[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the value

// 16 bytes hold the codes of 32 numbers: the first 16 in their low halves, the others in the high ones.
template <class Of> inline void split_halves(const uint8_t* p, const Of& number, Vec* to) {
    PH_UNROLL(8) for (int v = 0; v < kVectors / 2; ++v) {
        const VecInt codes = load_bytes(p + v * W);
        to[v] = number(codes), to[v + kVectors / 2] = number(codes >> 4);
    }
}

inline VecInt low_bits(const uint8_t* p, int v) {
    const VecInt codes = load_bytes(p + v % (kVectors / 2) * W);
    return v < kVectors / 2 ? codes & 15 : codes >> 4;
}

// With the fifth bits of 32 codes.
inline VecInt with_fifth_bits(VecInt low, uint32_t bits, int v) {
#if defined(__AVX512F__) && PH_WIDTH == 16
    return (VecInt)_mm512_mask_or_epi32((__m512i)low, (__mmask16)(bits >> v * W), (__m512i)low, (__m512i)splat_int(16));
#else
    return low | ((splat_int((int32_t)bits) >> (counted() + v * W)) & 1) << 4;
#endif
}

struct Q4_0 : SizeOf_Q4_0 {
    static constexpr int kHalves = 1;
    const uint8_t* at;
    Affine line;
    Q4_0(const uint8_t* p, const float* d) : at(p + 2), line(*d, -8.0f * *d) {}
    void unit(int, Vec* to) const { split_halves(at, line, to); }
};

struct Q4_1 : SizeOf_Q4_1 {
    static constexpr int kHalves = 2;
    const uint8_t* at;
    Affine line;
    Q4_1(const uint8_t* p, const float* d) : at(p + 4), line(d[0], d[1]) {}
    void unit(int, Vec* to) const { split_halves(at, line, to); }
};

struct Q5_0 : SizeOf_Q5_0 {
    static constexpr int kHalves = 1;
    const uint8_t* at;
    float d;
    Q5_0(const uint8_t* p, const float* d) : at(p), d(*d) {}
    void unit(int, Vec* to) const {
        const uint32_t bits = load_any<uint32_t>(at + 2);
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = as_floats(with_fifth_bits(low_bits(at + 6, v), bits, v) - 16) * d;
    }
};

struct Q5_1 : SizeOf_Q5_1 {
    static constexpr int kHalves = 2;
    const uint8_t* at;
    float d, m;
    Q5_1(const uint8_t* p, const float* d) : at(p), d(d[0]), m(d[1]) {}
    void unit(int, Vec* to) const {
        const uint32_t bits = load_any<uint32_t>(at + 4);
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = as_floats(with_fifth_bits(low_bits(at + 8, v), bits, v)) * d + m;
    }
};

struct Q8_0 : SizeOf_Q8_0 {
    static constexpr int kHalves = 1;
    const uint8_t* at;
    float d;
    Q8_0(const uint8_t* p, const float* d) : at(p + 2), d(*d) {}
    void unit(int, Vec* to) const {
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = as_floats(load_signed_bytes(at + v * W)) * d;
    }
};

// Numbers in runs of 16, each with a scale, of which a unit has two.
template <class Of> inline void in_runs(const Of& codes, float first, float second, Vec* to) {
    PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] = as_floats(codes(v)) * (v < kVectors / 2 ? first : second);
}

struct Q2_K : SizeOf_Q2_K {
    const uint8_t* at;
    float d, m;
    explicit Q2_K(const uint8_t* p) : at(p), d(half_at(p + 80)), m(half_at(p + 82)) {}
    void unit(int j, Vec* to) const {
        const uint8_t first = at[2 * j], second = at[2 * j + 1];
        in_runs([&](int v) { return load_bytes(at + 16 + j / 4 * 32 + v * W) >> 2 * (j % 4) & 3; }, d * (float)(first & 15),
                d * (float)(second & 15), to);
        for (int v = 0; v < kVectors; ++v) to[v] -= m * (float)((v < kVectors / 2 ? first : second) >> 4);
    }
};

struct Q3_K : SizeOf_Q3_K {
    const uint8_t* at;
    float d;
    explicit Q3_K(const uint8_t* p) : at(p), d(half_at(p + 108)) {}
    // 4 bits of a scale stand in the first 8 bytes, 2 more in the last 4.
    float scale(int i) const {
        const uint8_t* s = at + 96;
        return d * (float)(((s[i % 8] >> i / 8 * 4 & 15) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    }
    void unit(int j, Vec* to) const {
        in_runs([&](int v) {
            const VecInt low = load_bytes(at + 32 + j / 4 * 32 + v * W) >> 2 * (j % 4) & 3;
            return low + (load_bytes(at + v * W) >> j & 1) * 4 - 4;
        }, scale(2 * j), scale(2 * j + 1), to);
    }
};

// The scales and the minima of eight units, 6 bits each: four of either in 4 bytes, then the low bits of the
// others, whose high ones are those that the first eight bytes have left.
struct SixBits {
    float all[16];
    float scale(int j) const { return all[j]; }
    float minimum(int j) const { return all[8 + j]; }
    SixBits(const uint8_t* s, float d, float m) {
        const uint32_t a = load_any<uint32_t>(s), b = load_any<uint32_t>(s + 4), c = load_any<uint32_t>(s + 8);
        constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTwo = 0x03030303;
        const uint32_t codes[4] = {a & kSix, (c & kFour) | (a >> 6 & kTwo) << 4, b & kSix, (c >> 4 & kFour) | (b >> 6 & kTwo) << 4};
        PH_UNROLL(4) for (int i = 0; i < 16; i += W) {
            const Vec by = W == 16 ? choose((VecInt)(counted() < 8), splat(d), splat(m)) : splat(i < 8 ? d : m);
            store(as_floats(load_bytes((const uint8_t*)codes + i)) * by, all + i);
        }
    }
};

struct Q4_K : SizeOf_Q4_K {
    static constexpr int kGiven = 2;
    const uint8_t* at;
    SixBits by;
    explicit Q4_K(const uint8_t* p) : at(p + 16), by(p + 4, half_at(p), half_at(p + 2)) {}
    void unit(int j, Vec* to) const {
        const Affine low(by.scale(j), -by.minimum(j)), high(by.scale(j + 1), -by.minimum(j + 1));
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) {
            const VecInt codes = load_bytes(at + 16 * j + v * W);
            to[v] = low(codes), to[v + kVectors] = high(codes >> 4);
        }
    }
};

typedef uint8_t Bytes __attribute__((vector_size(32)));  // of a unit

struct Q5_K : SizeOf_Q5_K {
    static constexpr int kGiven = 2;
    const uint8_t* at;
    SixBits by;
    explicit Q5_K(const uint8_t* p) : at(p), by(p + 4, half_at(p), half_at(p + 2)) {}
    void unit(int j, Vec* to) const {
        const Bytes low = load_any<Bytes>(at + 48 + 16 * j), bits = load_any<Bytes>(at + 16);
        const Bytes codes[2] = {(low & 15) | (bits >> j & 1) << 4, low >> 4 | (bits >> (j + 1) & 1) << 4};
        for (int i = 0; i < 2; ++i)
            PH_UNROLL(8) for (int v = 0; v < kVectors; ++v)
                to[i * kVectors + v] = as_floats(load_bytes((const uint8_t*)(codes + i) + v * W)) * by.scale(j + i) - by.minimum(j + i);
    }
};

struct Q6_K : SizeOf_Q6_K {
    static constexpr int kGiven = 4;
    const uint8_t* at;
    float d;
    explicit Q6_K(const uint8_t* p) : at(p), d(half_at(p + 208)) {}
    void unit(int j, Vec* to) const {
        const int8_t* scales = (const int8_t*)at + 192 + 2 * j;
        const Bytes first = load_any<Bytes>(at + 16 * j), second = load_any<Bytes>(at + 16 * j + 32);
        const Bytes bits = load_any<Bytes>(at + 128 + 8 * j);
        const Bytes codes[4] = {(first & 15) | (bits << 4 & 48), (second & 15) | (bits << 2 & 48), first >> 4 | (bits & 48),
                                second >> 4 | (bits >> 2 & 48)};
        for (int i = 0; i < 4; ++i)
            in_runs([&](int v) { return load_bytes((const uint8_t*)(codes + i) + v * W) - 32; }, d * (float)scales[2 * i],
                    d * (float)scales[2 * i + 1], to + i * kVectors);
    }
};

struct IQ4_NL : SizeOf_IQ4_NL {
    const uint8_t* at;
    explicit IQ4_NL(const uint8_t* p) : at(p) {}
    void unit(int, Vec* to) const { split_halves(at + 2, Lookup{kCurved, half_at(at)}, to); }
};

struct IQ4_XS : SizeOf_IQ4_XS {
    const uint8_t* at;
    float d;
    explicit IQ4_XS(const uint8_t* p) : at(p), d(half_at(p)) {}
    void unit(int j, Vec* to) const {
        const int scale = (at[4 + j / 2] >> j % 2 * 4 & 15) | (load_any<uint16_t>(at + 2) >> 2 * j & 3) << 4;
        split_halves(at + 8 + 16 * j, Lookup{kCurved, d * (float)(scale - 32)}, to);
    }
};

struct TQ2_0 : SizeOf_TQ2_0 {
    const uint8_t* at;
    float d;
    explicit TQ2_0(const uint8_t* p) : at(p), d(half_at(p + 64)) {}
    void unit(int j, Vec* to) const {
        for (int v = 0; v < kVectors; ++v) to[v] = as_floats((load_bytes(at + j / 4 * 32 + v * W) >> 2 * (j % 4) & 3) - 1) * d;
    }
};

// Five numbers of three values share a byte, one number of base 3 as a fraction of 256.
struct TQ1_0 : SizeOf_TQ1_0 {
    const uint8_t* at;
    float d;
    explicit TQ1_0(const uint8_t* p) : at(p), d(half_at(p + 52)) {}
    // The digits of W numbers: the first of all bytes of a run come first, then the second.
    VecInt digits(int first) const {
        if (first < 160) return load_bytes(at + first % 32) * power(first / 32);
        if (first < 240) return load_bytes(at + 32 + first % 16) * power((first - 160) / 16);
        VecInt found;  // the last four bytes have four numbers each
        for (int i = 0; i < W; ++i) found[i] = at[48 + (first + i) % 4] * power((first - 240 + i) / 4);
        return found;
    }
    static int power(int i) {
        constexpr int kPowers[5] = {1, 3, 9, 27, 81};
        return kPowers[i];
    }
    void unit(int j, Vec* to) const {
        for (int v = 0; v < kVectors; ++v) to[v] = as_floats(((digits(32 * j + v * W) & 255) * 3 >> 8) - 1) * d;
    }
};

struct MXFP4 : SizeOf_MXFP4 {
    const uint8_t* at;
    explicit MXFP4(const uint8_t* p) : at(p) {}
    void unit(int, Vec* to) const {
        const uint32_t bits = at[0] < 2 ? 0x00200000u << at[0] : (uint32_t)(at[0] - 1) << 23;  // 2^(e − 128)
        split_halves(at + 1, Lookup{kMicro, load_any<float>(&bits)}, to);
    }
};

}  // namespace polyhead::PH_NAMESPACE
