// Products of weights in blocks with x in 8 bits: an option that is off by default.
//
//     x_k ≈ s_u q_k,  s_u = max |x| / 127 of unit u of 32 numbers          Σ_k w_k x_k ≈ Σ_u s_u (d_u Σ code q + m_u Σ q)
//
// Sums of a unit are whole numbers and exact. A vector has eight of them, each of four numbers that lie next to
// each other, with every instruction set; a row of x gets the same bits beside others and alone.
//
// A unit that is not finite makes sums NaN. Source: Q8_0 and Q8_1 of llama.cpp (there scales are rounded to 16 bits).
#pragma once

#include "products.h"

namespace polyhead::PH_NAMESPACE {

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t LaneInts __attribute__((vector_size(32)));
typedef uint8_t HalfBytes __attribute__((vector_size(16)));
typedef uint16_t HalfPairs __attribute__((vector_size(16)));

inline Lanes spread(float x) { return x - Lanes{}; }
inline Lanes add_product(Lanes sum, Lanes a, Lanes b) {
#if defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}
inline float sum_of(Lanes v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

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
// scale · (code − kMiddle) + minimum.
template <class B> struct Whole;

template <int Middle, bool Minimum, bool Signed = false> struct WholeWithHalves {
    static constexpr int kMiddle = Middle;
    static constexpr bool kMinimum = Minimum, kSigned = Signed;
    const uint8_t* at;
    const float* d;
    Lanes scale(int) const { return spread(d[0]); }
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
    static constexpr bool kMinimum = true, kSigned = false;
    const uint8_t* at;
    SixBits by;
    WholeWithMinima(const uint8_t* p, const float*) : at(p), by(p + 4, half_at(p), half_at(p + 2)) {}
    Lanes scale(int j) const { return spread(by.scale(j)); }
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
    static constexpr bool kMinimum = false, kSigned = false;
    const uint8_t* at;
    float d;
    Whole(const uint8_t* p, const float*) : at(p), d(half_at(p + 208)) {}
    // A scale for 16 numbers, which are four lanes.
    Lanes scale(int j) const {
        const int8_t* scales = (const int8_t*)at + 192 + 2 * j;
        const float a = d * (float)scales[0], b = d * (float)scales[1];
        return Lanes{a, a, a, a, b, b, b, b};
    }
    Bytes codes(int j) const {
        const Bytes low = load_any<Bytes>(at + j / 4 * 64 + j % 2 * 32), bits = load_any<Bytes>(at + 128 + j / 4 * 32);
        return (low >> 4 * (j / 2 % 2) & 15) | (bits >> 2 * (j % 4) & 3) << 4;
    }
};

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

// start + Σ of four codes each, times those of x.
template <class B> inline LaneInts dots(const Int8Unit& x, Bytes codes) {
    constexpr bool kSigned = Whole<B>::kSigned;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if (kSigned) codes ^= 128;  // 128 too large
    return (LaneInts)_mm256_dpbusd_epi32((__m256i)x.start, (__m256i)codes, (__m256i)x.codes);
#elif defined(__AVX2__)
    // Of 7 bits two products fit in 16: 2 · 127 · 128 at most.
    __m256i a = (__m256i)codes, b = (__m256i)x.codes;
    if (kSigned) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
    return x.start + (LaneInts)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    LaneInts found = x.start;  // codes of 7 bits are signed bytes too
    for (int half = 0; half < 2; ++half) {
        const int8x16_t a = load_any<int8x16_t>((const uint8_t*)&codes + 16 * half), b = load_any<int8x16_t>((const uint8_t*)&x.codes + 16 * half);
        int32_t* to = (int32_t*)&found + 4 * half;
        vst1q_s32(to, vdotq_s32(vld1q_s32(to), a, b));
    }
    return found;
#else
    LaneInts found = x.start;
    for (int i = 0; i < 32; ++i) found[i / 4] += (kSigned ? (int8_t)codes[i] : codes[i]) * (int8_t)x.codes[i];
    return found;
#endif
}

// What `dots` starts with, times the sums of four codes of x.
template <class B> constexpr int start_of() {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    if (Whole<B>::kSigned) return -128;
#endif
    return -Whole<B>::kMiddle;
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
        int total = 0;
        alignas(64) int32_t codes[kUnit];
        for (int v = 0; v < kVectors; ++v)  // adding 1.5 · 2^23 rounds to a whole number
            store_any(codes + v * W, (VecInt)multiply_add(splat(12582912.0f), load(x + v * W), splat(by)) - 0x4b400000);
        for (int i = 0; i < kUnit; ++i) made.codes[i] = (uint8_t)codes[i], total += codes[i];
        for (int i = 0; i < kUnit; ++i) made.start[i / 4] += start * codes[i];
        made.scale = top / 127.0f, made.total = made.scale * (float)total;
    }
    return made;
}

// found[m · stride + r] for R rows of blocks and M rows of x, each of K / 32 units.
template <class B, int R, int M>
void int8_dots(const Int8Unit* x, int64_t units, const uint8_t* w, int64_t row_bytes, float* found, int64_t stride) {
    constexpr int kUnits = B::kNumbers / kUnit;
    Lanes acc[R][M] = {};
    Lanes least[R][M] = {};  // all lanes alike
    for (int64_t u = 0; u < units; u += kUnits, w += B::kBytes) {
        float halves[2 * R];
        halves_of<B::kHalves, R>(w, row_bytes, halves);
        PH_UNROLL(4) for (int r = 0; r < R; ++r) {
            prefetch_block<B>(w + r * row_bytes);
            auto block = [&] {
                if constexpr (B::kHalves) return Whole<B>{{w + r * row_bytes, halves + r * B::kHalves}};
                else return Whole<B>(w + r * row_bytes, nullptr);
            }();
            PH_UNROLL(8) for (int j = 0; j < kUnits; ++j) {
                const Bytes codes = block.codes(j);
                const Lanes scale = block.scale(j);
                PH_UNROLL(4) for (int m = 0; m < M; ++m) {
                    const Int8Unit& by = x[m * units + u + j];
                    const Lanes scaled = __builtin_convertvector(dots<B>(by, codes), Lanes) * scale;
                    acc[r][m] = add_product(acc[r][m], scaled, spread(by.scale));
                    if constexpr (Whole<B>::kMinimum) least[r][m] = add_product(least[r][m], spread(block.minimum(j)), spread(by.total));
                }
            }
        }
    }
    PH_UNROLL(4) for (int r = 0; r < R; ++r)
        PH_UNROLL(4) for (int m = 0; m < M; ++m) found[m * stride + r] = sum_of(acc[r][m]) + least[r][m][0];
}

constexpr int kInt8Rows = 8;  // of x that are rounded at a time

// done(n, count, dots[m · stride + i] of row n + i of a weight with row m of x [rows, K]) until n is `last`.
template <class Done>
void over_rows_int8(const float* x, int64_t rows, int64_t K, const LinearWeight& f, int64_t first, int64_t last, int64_t stride, Done&& done) {
    with_whole(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        constexpr int R = kRowsAtOnce;
        const int64_t units = K / kUnit, row_bytes = f.row_bytes;
        Int8Unit* made = (Int8Unit*)__builtin_alloca_with_align(rows * units * sizeof(Int8Unit), 8 * alignof(Int8Unit));
        for (int64_t u = 0; u < rows * units; ++u) made[u] = int8_unit_of(x + u * kUnit, start_of<B>());
        float* found = (float*)__builtin_alloca(rows * stride * sizeof(float));
        const uint8_t* w = (const uint8_t*)f.weight + first * row_bytes;
        int64_t n = first;
        for (; rows == 1 && n + R <= last; n += R, w += R * row_bytes) {
            int8_dots<B, R, 1>(made, units, w, row_bytes, found, stride);
            done(n, R, found);
        }
        auto tile = [&](auto count) {
            constexpr int C = count;
            int64_t m = 0;
            for (; m + 4 <= rows; m += 4) int8_dots<B, C, 4>(made + m * units, units, w, row_bytes, found + m * stride, stride);
            for (; m + 2 <= rows; m += 2) int8_dots<B, C, 2>(made + m * units, units, w, row_bytes, found + m * stride, stride);
            for (; m < rows; ++m) int8_dots<B, C, 1>(made + m * units, units, w, row_bytes, found + m * stride, stride);
            done(n, C, found);
            n += C, w += C * row_bytes;
        };
        // Short blocks without minima leave registers for more rows, which read x once.
        constexpr int kTile = PH_WIDTH < 16 || Whole<B>::kMinimum || B::kNumbers > kUnit ? 1 : 4;
        while (n + kTile <= last) tile(std::integral_constant<int, kTile>{});
        while (n < last) tile(std::integral_constant<int, 1>{});
    });
}

}  // namespace polyhead::PH_NAMESPACE
