// Weights as GGUF files hold them: rows of blocks of 32 or 256 numbers, each a code of a few bits, with
// what scales them. A block gives its numbers 32 at a time, as vectors.
// Scales in 16 bits that stand at the beginning of a block are handed to it: those of several rows become
// float32 at once. kGiven units are made together where they share bytes; kHalved ones have a scale for each half.
//
// The numbers are those of the gguf package's unpacking, bit for bit: a code times its scale has at most 24
// bits, so only the last addition rounds, and it does not matter whether it is one instruction with the product.
// A product adds them in the order of dot_rows: its results are those of the same numbers in float32.
#pragma once

#include <array>

#include "../common/vector.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

#define PH_SIZE(name, number, numbers, bytes) \
    struct SizeOf_##name { \
        static constexpr int kNumbers = numbers, kBytes = bytes, kHalves = 0, kGiven = 1, kMiddle = 0; \
        static constexpr bool kScaled = number >= kFirstScaled, kSigned = false, kHalved = false; \
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
constexpr std::array<int8_t, 16> as_codes(const float (&table)[16]) {
    std::array<int8_t, 16> found{};
    for (int i = 0; i < 16; ++i) found[i] = (int8_t)table[i];
    return found;
}
constexpr std::array<int8_t, 16> kCurvedCodes = as_codes(kCurved), kMicroCodes = as_codes(kMicro);

// The codes of a unit, and of half of it.
typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef uint8_t HalfBytes __attribute__((vector_size(16)));
typedef uint16_t HalfPairs __attribute__((vector_size(16)));
typedef uint32_t HalfWords __attribute__((vector_size(16)));
inline HalfBytes four_times(uint32_t word) { return (HalfBytes)(word - HalfWords{}); }

inline Bytes joined(HalfBytes first, HalfBytes second) {
#if defined(__AVX2__)
    return (Bytes)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)first), (__m128i)second, 1);
#else
    Bytes both;
    __builtin_memcpy(&both, &first, 16), __builtin_memcpy((uint8_t*)&both + 16, &second, 16);
    return both;
#endif
}

// 32 bytes from the halves of 16.
inline Bytes nibbles(const uint8_t* p) {
    const HalfBytes x = load_any<HalfBytes>(p);
    return joined(x, (HalfBytes)((HalfPairs)x >> 4)) & 15;
}

// Those of a table for each half, at places below 16.
inline Bytes looked_up(Bytes tables, Bytes places) {
#if defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)tables, (__m256i)places);
#elif defined(__aarch64__)
    Bytes found;
    PH_UNROLL(2) for (int i = 0; i < 32; i += 16)
        store_any((uint8_t*)&found + i, vqtbl1q_u8(load_any<uint8x16_t>((uint8_t*)&tables + i), load_any<uint8x16_t>((uint8_t*)&places + i)));
    return found;
#else
    Bytes found;
    for (int i = 0; i < 32; ++i) found[i] = tables[i / 16 * 16 + places[i]];
    return found;
#endif
}
inline Bytes looked_up(const std::array<int8_t, 16>& table, Bytes places) {
    const HalfBytes all = load_any<HalfBytes>(&table);
    return looked_up(joined(all, all), places);
}

// Numbers of W bytes of either sign from byte v · W on.
inline VecInt signed_numbers(Bytes x, int v) {
#if defined(__AVX512F__) && PH_WIDTH == 16
    return (VecInt)_mm512_cvtepi8_epi32(v ? _mm256_extracti128_si256((__m256i)x, 1) : _mm256_castsi256_si128((__m256i)x));
#else
    return load_signed_bytes((const uint8_t*)&x + v * W);
#endif
}

// So many bits of each byte, from place `first` on.
inline Bytes bits_of(Bytes x, int first, int bits) {
    typedef uint16_t Pairs __attribute__((vector_size(32)));  // bytes alone have no shift
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    return (Bytes)((Pairs)x >> first) & mask;
}

// 255 where a bit is set.
inline Bytes where_set(uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (Bytes)_mm256_movm_epi8(bits);
#elif defined(__AVX2__)
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i of_eight = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    return (Bytes)_mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), of_eight), bit), bit);
#else
    Bytes found;
    for (int i = 0; i < 32; ++i) found[i] = (uint8_t)-(bits >> i & 1);
    return found;
#endif
}

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

// Numbers of blocks that give the codes of a unit as bytes of either sign, and the scale of each half.
template <class B> struct SignedCodes {
    void unit(int j, Vec* to) const {
        const B& of = static_cast<const B&>(*this);
        const Bytes codes = of.codes(j);
        in_runs([&](int v) { return signed_numbers(codes, v); }, of.scale(j, 0), of.scale(j, 1), to);
    }
};

// Two bits of each of 32 bytes: a block's first 32 bytes have those of units 0 to 3.
inline Bytes two_bits(const uint8_t* p, int j) { return bits_of(load_any<Bytes>(p + j / 4 * 32), 2 * (j % 4), 2); }

struct Q2_K : SizeOf_Q2_K {
    const uint8_t* at;
    float d, m;
    explicit Q2_K(const uint8_t* p) : at(p), d(half_at(p + 80)), m(half_at(p + 82)) {}
    float minimum(int j, int half) const { return -m * (float)(at[2 * j + half] >> 4); }
    void unit(int j, Vec* to) const {
        const Bytes codes = two_bits(at + 16, j);
        in_runs([&](int v) { return signed_numbers(codes, v); }, d * (float)(at[2 * j] & 15), d * (float)(at[2 * j + 1] & 15), to);
        PH_UNROLL(8) for (int v = 0; v < kVectors; ++v) to[v] += minimum(j, v / (kVectors / 2));
    }
};

struct Q3_K : SizeOf_Q3_K, SignedCodes<Q3_K> {
    const uint8_t* at;
    float scales[16];
    // 4 bits of a scale stand in the first 8 bytes, 2 more in the last 4.
    explicit Q3_K(const uint8_t* p) : at(p) {
        const float d = half_at(p + 108);
        const uint32_t a = load_any<uint32_t>(p + 96), b = load_any<uint32_t>(p + 100), c = load_any<uint32_t>(p + 104);
        constexpr uint32_t kFour = 0x0f0f0f0f, kTwo = 0x03030303;
        const uint32_t codes[4] = {(a & kFour) | (c & kTwo) << 4, (b & kFour) | (c >> 2 & kTwo) << 4,
                                   (a >> 4 & kFour) | (c >> 4 & kTwo) << 4, (b >> 4 & kFour) | (c >> 6 & kTwo) << 4};
        PH_UNROLL(4) for (int i = 0; i < 16; i += W) store(as_floats(load_bytes((const uint8_t*)codes + i) - 32) * d, scales + i);
    }
    float scale(int j, int half) const { return scales[2 * j + half]; }
    Bytes raised(int j) const { return two_bits(at + 32, j) | bits_of(load_any<Bytes>(at), j, 1) << 2; }  // by 4
    Bytes codes(int j) const { return raised(j) - 4; }
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

struct Q5_K : SizeOf_Q5_K {
    static constexpr int kGiven = 2;
    const uint8_t* at;
    SixBits by;
    explicit Q5_K(const uint8_t* p) : at(p), by(p + 4, half_at(p), half_at(p + 2)) {}
    void unit(int j, Vec* to) const {
        const Bytes low = load_any<Bytes>(at + 48 + 16 * j), bits = load_any<Bytes>(at + 16);
        const Bytes codes[2] = {(low & 15) | bits_of(bits, j, 1) << 4, bits_of(low, 4, 4) | bits_of(bits, j + 1, 1) << 4};
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
        const Bytes codes[4] = {(first & 15) | (bits << 4 & 48), (second & 15) | (bits << 2 & 48), bits_of(first, 4, 4) | (bits & 48),
                                bits_of(second, 4, 4) | (bits >> 2 & 48)};
        for (int i = 0; i < 4; ++i)
            in_runs([&](int v) { return load_bytes((const uint8_t*)(codes + i) + v * W) - 32; }, d * (float)scales[2 * i],
                    d * (float)scales[2 * i + 1], to + i * kVectors);
    }
};

struct IQ4_NL : SizeOf_IQ4_NL {
    const uint8_t* at;
    float d;
    explicit IQ4_NL(const uint8_t* p) : at(p + 2), d(half_at(p)) {}
    void unit(int, Vec* to) const { split_halves(at, Lookup{kCurved, d}, to); }
    float scale(int, int) const { return d; }
    Bytes codes(int) const { return looked_up(kCurvedCodes, nibbles(at)); }
};

struct IQ4_XS : SizeOf_IQ4_XS {
    const uint8_t* at;
    float d;
    explicit IQ4_XS(const uint8_t* p) : at(p), d(half_at(p)) {}
    void unit(int j, Vec* to) const { split_halves(at + 8 + 16 * j, Lookup{kCurved, scale(j, 0)}, to); }
    float scale(int j, int) const {
        const int scale = (at[4 + j / 2] >> j % 2 * 4 & 15) | (load_any<uint16_t>(at + 2) >> 2 * j & 3) << 4;
        return d * (float)(scale - 32);
    }
    Bytes codes(int j) const { return looked_up(kCurvedCodes, nibbles(at + 8 + 16 * j)); }
};

struct MXFP4 : SizeOf_MXFP4 {
    const uint8_t* at;
    explicit MXFP4(const uint8_t* p) : at(p) {}
    void unit(int, Vec* to) const { split_halves(at + 1, Lookup{kMicro, scale(0, 0)}, to); }
    float scale(int, int) const {
        const uint32_t bits = at[0] < 2 ? 0x00200000u << at[0] : (uint32_t)(at[0] - 1) << 23;  // 2^(e − 128)
        return load_any<float>(&bits);
    }
    Bytes codes(int) const { return looked_up(kMicroCodes, nibbles(at + 1)); }
};

struct TQ2_0 : SizeOf_TQ2_0, SignedCodes<TQ2_0> {
    const uint8_t* at;
    float d;
    explicit TQ2_0(const uint8_t* p) : at(p), d(half_at(p + 64)) {}
    float scale(int, int) const { return d; }
    Bytes codes(int j) const { return two_bits(at, j) - 1; }
};

// Five numbers of three values share a byte, one number of base 3 as a fraction of 256: the first of all bytes of a run
// come first, then the second. Runs are of 32, 16 and 4 bytes; the last have four numbers each.
struct TQ1_0 : SizeOf_TQ1_0, SignedCodes<TQ1_0> {
    const uint8_t* at;
    float d;
    explicit TQ1_0(const uint8_t* p) : at(p), d(half_at(p + 52)) {}
    float scale(int, int) const { return d; }
    Bytes codes(int j) const {
        constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
        Bytes digits;  // those to come as a fraction
        if (j < 5) digits = load_any<Bytes>(at) * kPowers[j];
        else {
            const HalfBytes run = load_any<HalfBytes>(at + 32);
            if (j < 7) digits = joined(run * kPowers[2 * j - 10], run * kPowers[2 * j - 9]);
            else {
                constexpr HalfWords kOfWords = {0x01010101, 0x03030303, 0x09090909, 0x1b1b1b1b};
                digits = joined(run * kPowers[4], four_times(load_any<uint32_t>(at + 48)) * (HalfBytes)kOfWords);
            }
        }
        return (Bytes)(-1 - (digits > 85) - (digits > 170));
    }
};

}  // namespace polyhead::PH_NAMESPACE
