// A row or two of x in 8 bits with rows of weights in blocks, each number with the bits of int8_activations.h.
#pragma once

#include <array>

#include "int8_activations.h"

namespace polyhead::PH_NAMESPACE {

// The same unit of M rows of x, M = 1 or 2; scale and total of row i are lanes i, i + M, …. Where minima are for halves,
// start is s Σ q of each, four times.
template <int M> struct Int8Rows {
    Bytes codes[M];
    LaneInts start[M];
    Four scale, total;
};

template <int M> void int8_rows_of(const float* x, int64_t units, int start, bool totals_of_halves, Int8Rows<M>* to) {
    for (int64_t u = 0; u < units; ++u)
        for (int m = 0; m < M; ++m) {
            const Int8Unit made = int8_unit_of(x + (m * units + u) * kUnit, totals_of_halves ? 1 : start);
            to[u].codes[m] = made.codes, to[u].start[m] = made.start;
            for (int i = m; i < 4; i += M) to[u].scale[i] = made.scale, to[u].total[i] = made.total;
            if (totals_of_halves)
                for (int h = 0; h < 8; h += 4) {
                    const Four total = made.scale * (float)(made.start[h] + made.start[h + 1] + made.start[h + 2] + made.start[h + 3]) - Four{};
                    __builtin_memcpy((float*)(to[u].start + m) + h, &total, sizeof total);
                }
        }
}

// s Σ q of the numbers that share minimum h.
template <class F, int M> inline Four total_of(const Int8Rows<M>& x, int h) {
    if constexpr (F::kMinima < 2) return x.total;
    const Four first = load_any<Four>((const float*)x.start + 4 * h), last = load_any<Four>((const float*)(x.start + M - 1) + 4 * h);
    return __builtin_shufflevector(first, last, 0, 4, 0, 4);
}

// Four units of a row of x, packed once for all rows of a weight: sixteen bytes of each unit, which meet the lower halves of
// bytes, then those that meet the upper ones.
struct Int8Fours {
    alignas(64) uint8_t low[64], high[64];
    int32_t start[16];
    Four scale[4], total[4];
};

inline void int8_fours_of(const Int8Rows<1>* x, int64_t fours, Int8Fours* to) {
    for (int64_t f = 0; f < fours; ++f, ++to)
        for (int i = 0; i < 4; ++i, ++x) {
            __builtin_memcpy(to->low + 16 * i, x->codes, 16), __builtin_memcpy(to->high + 16 * i, (const char*)x->codes + 16, 16);
            for (int lane = 0; lane < 4; ++lane) to->start[4 * i + lane] = x->start[0][lane] + x->start[0][4 + lane];
            to->scale[i] = x->scale, to->total[i] = x->total;
        }
}

#if defined(__AVX512VNNI__) && PH_WIDTH == 16
// Whether x is read so: with blocks of one unit whose codes are halves of 16 bytes.
template <class B> constexpr bool kInFours = __is_same(B, Q4_0) || __is_same(B, Q4_1);

// Sixteen bytes at each of four places.
inline __m512i four_of_16(const void* from, int64_t stride) {
    const char* p = (const char*)from;
    __m512i found = _mm512_castsi128_si512(load_any<__m128i>(p));
    found = _mm512_inserti32x4(found, load_any<__m128i>(p + stride), 1);
    found = _mm512_inserti32x4(found, load_any<__m128i>(p + 2 * stride), 2);
    return _mm512_inserti32x4(found, load_any<__m128i>(p + 3 * stride), 3);
}

// Four numbers of a byte of each of four rows, those of place i in 128 bits: as bytes [place, row], where places are chosen.
inline __m512i four_of_rows(__m512i bytes, int a, int b, int c, int d) {
    const __m512i of_rows = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    auto place = [](int i) { return 0x0c080400 + i * 0x01010101; };
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(of_rows, bytes), _mm512_set4_epi32(place(d), place(c), place(b), place(a)));
}

// 32 bytes of one unit, and of another.
inline __m512i two_units(const LaneInts& first, const LaneInts& second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
}

// `bits` of each of 32 bytes from place `first` on, then from place `second` on.
inline __m512i bits_of_units(const uint8_t* p, int first, int second, int bits) {
    const __m512i both = _mm512_broadcast_i64x4(load_any<__m256i>(p)), at = _mm512_inserti64x4(_mm512_set1_epi16(first), _mm256_set1_epi16(second), 1);
    return _mm512_srlv_epi16(both, at) & _mm512_set1_epi8((1 << bits) - 1);
}

// Sums over each 128 bits of four rows' vectors: 128 bits of the result are four rows. Two of their numbers fit in 16 bits.
inline __m512i sums_of_rows(const __m512i* v) {
    const __m512i ones = _mm512_set1_epi16(1);
    auto add_pairs = [&](__m512i a, __m512i b) { return _mm512_madd_epi16(_mm512_packs_epi32(a, b), ones); };
    return add_pairs(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
}

// Adds the products of one unit after another, whose places are given, each of the 128 bits of a vector.
template <int... Places> inline void add_units(Four& sum, Vec v, const Four* by, std::integer_sequence<int, Places...>) {
    int i = 0;
    ((sum = add_product(sum, (Four)_mm512_extractf32x4_ps((__m512)v, Places), by[i++])), ...);
}
using InOrder = std::integer_sequence<int, 0, 1, 2, 3>;

// Places of the halves of four blocks among 32: those of block i go to lanes 4 i to 4 i + 3, second halves 16 lanes on.
template <class B> constexpr std::array<uint16_t, 32> places_of_halves() {
    std::array<uint16_t, 32> found{};
    for (int i = 0; i < 32; ++i) found[i] = i % 16 / 4 * (B::kBytes / 2) + (B::kHalves == 2 ? i / 16 : 0);
    return found;
}

// What four rows of blocks and a row of x give is added to `acc` and `least`; Q4_0 and Q4_1, four units at a time. Sums of
// 8 products of 4 and 8 bits, and those of two such, fit in 16 bits.
template <class B> inline void nibble_dots(const Int8Fours* x, int64_t fours, const uint8_t* w, int64_t row_bytes, Four& acc, Four& least) {
    alignas(64) static constexpr std::array<uint16_t, 32> kPlaces = places_of_halves<B>();
    const __m512i places = load_any<__m512i>(&kPlaces), nibble = _mm512_set1_epi8(15);
    for (int64_t f = 0; f < fours; ++f, ++x, w += 4 * B::kBytes) {
        const __m512i low = load_any<__m512i>(x->low), high = load_any<__m512i>(x->high), start = load_any<__m512i>(x->start);
        __m512i halves{}, dot[4];
        PH_UNROLL(4) for (int r = 0; r < 4; ++r) {
            const uint8_t* p = w + r * row_bytes;
            __builtin_prefetch(p + 2 * kPrefetch, 0, 1), __builtin_prefetch(p + 2 * kPrefetch + 64, 0, 1);
            const __m512i codes = four_of_16(p + 2 * B::kHalves, B::kBytes);
            dot[r] = _mm512_dpbusd_epi32(start, codes & nibble, low);
            dot[r] = _mm512_dpbusd_epi32(dot[r], _mm512_srli_epi16(codes, 4) & nibble, high);
            halves = _mm512_mask_permutexvar_epi16(halves, 0x11111111u << r, places, load_any<__m512i>(p));
        }
        const Vec by = (Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        add_units(acc, (Vec)_mm512_cvtepi32_ps(sums_of_rows(dot)) * by, x->scale, InOrder{});
        if constexpr (FormOf<B>::kMinima) add_units(least, (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), x->total, InOrder{});
    }
}

// The same for Q4_K and Q5_K, a block at a time. Four products of 4 or 5 and 8 bits, and two such sums, fit in 16 bits.
template <class B> inline void six_bit_scale_dots(const Int8Rows<1>* x, int64_t units, const uint8_t* w, int64_t row_bytes, Four& acc, Four& least) {
    constexpr int kCodesAt = B::kBytes - 128;  // behind two halves, scales, and the fifth bits
    using EvenFirst = std::integer_sequence<int, 0, 2, 1, 3>;  // units lie as 0, 2, 1, 3
    const __m512i nibble = _mm512_set1_epi8(15), six = _mm512_set1_epi8(63), upper = _mm512_set1_epi8(0x30);
    for (int64_t u = 0; u < units; u += 8, x += 8, w += B::kBytes) {
        float halves[8];
        halves_of<2, 4>(w, row_bytes, halves);
        const __m512 both = _mm512_castps256_ps512(_mm256_loadu_ps(halves));
        const Vec d = (Vec)_mm512_permutexvar_ps(_mm512_set4_epi32(6, 4, 2, 0), both), m = (Vec)_mm512_permutexvar_ps(_mm512_set4_epi32(7, 5, 3, 1), both);
        const __m512i packed = four_of_16(w + 4, row_bytes);
        // As SixBits, of four rows: eight scales, eight minima; then for each four of them bytes [unit, row].
        const __m512i low = _mm512_shuffle_epi32(packed, (_MM_PERM_ENUM)0x50), rest = _mm512_shuffle_epi32(packed, (_MM_PERM_ENUM)0xaa);
        const __m512i high = (_mm512_srlv_epi32(rest, _mm512_set4_epi32(4, 0, 0, 0)) & nibble) | (_mm512_srli_epi32(low, 2) & upper);
        const __m512i codes = four_of_rows(_mm512_mask_blend_epi32(0xaaaa, low & six, high), 0, 2, 1, 3);
        auto floats = [&](auto i) { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, i))); };
        auto four = [&](auto half) {  // units 4 half to 4 half + 3
            constexpr int h = half;
            const Int8Rows<1>* by = x + 4 * h;
            __m512i even[4], odd[4];
            auto codes_of = [&](int i) { return two_units((LaneInts)by[i].codes[0], (LaneInts)by[i + 2].codes[0]); };
            const __m512i first = codes_of(0), second = codes_of(1);
            PH_UNROLL(4) for (int r = 0; r < 4; ++r) {
                const uint8_t* p = w + r * row_bytes;
                if (!h) prefetch_block<B>(p);
                const __m512i bytes = load_any<__m512i>(p + kCodesAt + 64 * h);
                __m512i a = bytes & nibble, b = _mm512_srli_epi16(bytes, 4) & nibble;
                if constexpr (__is_same(B, Q5_K)) {
                    a |= _mm512_slli_epi16(bits_of_units(p + 16, 4 * h, 4 * h + 2, 1), 4);
                    b |= _mm512_slli_epi16(bits_of_units(p + 16, 4 * h + 1, 4 * h + 3, 1), 4);
                }
                even[r] = _mm512_dpbusd_epi32(__m512i{}, a, first), odd[r] = _mm512_dpbusd_epi32(__m512i{}, b, second);
            }
            const __m512i a = sums_of_rows(even), b = sums_of_rows(odd);  // 0, 0, 2, 2 and 1, 1, 3, 3
            const __m512i dots = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
            Four scale[4], total[4];
            PH_UNROLL(4) for (int i = 0; i < 4; ++i) scale[i] = by[i].scale, total[i] = by[i].total;
            add_units(acc, (Vec)_mm512_cvtepi32_ps(dots) * (floats(std::integral_constant<int, h>{}) * d), scale, EvenFirst{});
            add_units(least, -(floats(std::integral_constant<int, 2 + h>{}) * m), total, EvenFirst{});
        };
        four(std::integral_constant<int, 0>{}), four(std::integral_constant<int, 1>{});
    }
}

// As Q3_K, scales of four rows: sixteen bytes of each, of which the first two are none.
inline __m512i three_bit_scales(__m512i packed) {
    const __m512i a = _mm512_shuffle_epi8(packed, _mm512_set4_epi32(0x09080706, 0x05040302, 0x09080706, 0x05040302));
    const __m512i c = _mm512_shuffle_epi8(packed, _mm512_set1_epi32(0x0d0c0b0a));
    const __m512i low = _mm512_srlv_epi32(a, _mm512_set4_epi32(4, 4, 0, 0)) & _mm512_set1_epi8(15);
    const __m512i high = _mm512_srlv_epi32(c, _mm512_set4_epi32(6, 4, 2, 0)) & _mm512_set1_epi8(3);
    return _mm512_sub_epi8(low | _mm512_slli_epi16(high, 4), _mm512_set1_epi8(32));
}

// Of a row of blocks the codes of units 4 · half and 4 · half + 1, and of the two behind them.
template <class B> inline void codes_of_four(const uint8_t* p, int half, __m512i* to) {
    if constexpr (__is_same(B, Q6_K)) {
        const __m512i bytes = load_any<__m512i>(p + 64 * half), nibble = _mm512_set1_epi8(15);
        to[0] = (bytes & nibble) | _mm512_slli_epi16(bits_of_units(p + 128 + 32 * half, 0, 2, 2), 4);
        to[1] = (_mm512_srli_epi16(bytes, 4) & nibble) | _mm512_slli_epi16(bits_of_units(p + 128 + 32 * half, 4, 6, 2), 4);
        return;
    }
    PH_UNROLL(2) for (int i = 0; i < 2; ++i) {
        to[i] = bits_of_units(p + (__is_same(B, Q2_K) ? 16 : 32) + 32 * half, 4 * i, 4 * i + 2, 2);
        if (__is_same(B, Q3_K)) to[i] |= _mm512_slli_epi16(bits_of_units(p, 4 * half + 2 * i, 4 * half + 2 * i + 1, 1), 2);
    }
}

// The same for Q2_K, Q3_K and Q6_K, of which sixteen numbers have a scale. Four products of 6 and 8 bits, and two such sums,
// fit in 16 bits.
template <class B> inline void dots_of_halves(const Int8Rows<1>* x, int64_t units, const uint8_t* w, int64_t row_bytes, Four& acc, Four& least) {
    constexpr bool kTwo = __is_same(B, Q2_K), kThree = __is_same(B, Q3_K);
    for (int64_t u = 0; u < units; u += 8, x += 8, w += B::kBytes) {
        auto half_of = [&](int r, int at) { return half_at(w + r * row_bytes + at); };
        auto halves = [&](int at) { return Four{half_of(0, at), half_of(1, at), half_of(2, at), half_of(3, at)}; };
        auto floats = [](__m512i bytes, auto place) { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, place))); };
        const Four d = halves(kTwo ? 80 : kThree ? 108 : 208);
        const Vec each_d = (Vec)_mm512_broadcast_f32x4((__m128)d), each_m = (Vec)_mm512_broadcast_f32x4((__m128)(kTwo ? -halves(82) : Four{}));
        const __m512i packed = four_of_16(w + (kTwo ? 0 : kThree ? 94 : 192), row_bytes);
        const __m512i scales = four_of_rows(kTwo ? packed & _mm512_set1_epi8(15) : kThree ? three_bit_scales(packed) : packed, 0, 1, 2, 3);
        const __m512i minima = four_of_rows(_mm512_srli_epi16(packed, 4) & _mm512_set1_epi8(15), 0, 1, 2, 3);
        auto add = [&](auto place, const __m512i* dots, const Int8Rows<1>* by) {  // units 2 · place and 2 · place + 1
            const Vec sums = (Vec)_mm512_cvtepi32_ps(sums_of_rows(dots));
            if constexpr (kTwo) {  // whole numbers of a unit are added first
                const __m512 whole = (__m512)(sums * floats(scales, place));
                acc = add_product(acc, (Four)(_mm512_castps512_ps128(whole) + _mm512_extractf32x4_ps(whole, 1)) * d, by[0].scale);
                acc = add_product(acc, (Four)(_mm512_extractf32x4_ps(whole, 2) + _mm512_extractf32x4_ps(whole, 3)) * d, by[1].scale);
                using F = FormOf<B>;
                const Four totals[4] = {total_of<F>(by[0], 0), total_of<F>(by[0], 1), total_of<F>(by[1], 0), total_of<F>(by[1], 1)};
                add_units(least, floats(minima, place) * each_m, totals, InOrder{});
            } else {
                const Four of[4] = {by[0].scale, by[0].scale, by[1].scale, by[1].scale};
                add_units(acc, sums * (floats(scales, place) * each_d), of, InOrder{});
            }
        };
        auto four = [&](auto half) {  // units 4 half to 4 half + 3
            constexpr int h = half;
            const Int8Rows<1>* by = x + 4 * h;
            auto codes_of = [&](int i) { return two_units((LaneInts)by[i].codes[0], (LaneInts)by[i + 1].codes[0]); };
            auto start_of = [&](int i) { return kTwo ? __m512i{} : two_units(by[i].start[0], by[i + 1].start[0]); };
            const __m512i first = codes_of(0), second = codes_of(2), first_start = start_of(0), second_start = start_of(2);
            __m512i lower[4], upper[4], codes[2];
            PH_UNROLL(4) for (int r = 0; r < 4; ++r) {
                const uint8_t* p = w + r * row_bytes;
                if (!h) prefetch_block<B>(p);
                codes_of_four<B>(p, h, codes);
                lower[r] = _mm512_dpbusd_epi32(first_start, codes[0], first), upper[r] = _mm512_dpbusd_epi32(second_start, codes[1], second);
            }
            add(std::integral_constant<int, 2 * h>{}, lower, by), add(std::integral_constant<int, 2 * h + 1>{}, upper, by + 2);
        };
        four(std::integral_constant<int, 0>{}), four(std::integral_constant<int, 1>{});
    }
}
#else
template <class B> constexpr bool kInFours = false;
#endif

// The first units of four rows of blocks and a row of x, where there is a way of their own. Returns how many were added.
template <class B>
inline int64_t dots_of_four_rows(const Int8Rows<1>* x, const Int8Fours* fours, int64_t units, const uint8_t* w, int64_t row_bytes, Four& acc, Four& least) {
#if defined(__AVX512VNNI__) && PH_WIDTH == 16
    if constexpr (kInFours<B>) return nibble_dots<B>(fours, units / 4, w, row_bytes, acc, least), units / 4 * 4;
    if constexpr (__is_same(B, Q4_K) || __is_same(B, Q5_K)) return six_bit_scale_dots<B>(x, units, w, row_bytes, acc, least), units;
    if constexpr (__is_same(B, Q2_K) || __is_same(B, Q3_K) || __is_same(B, Q6_K)) return dots_of_halves<B>(x, units, w, row_bytes, acc, least), units;
#endif
    return 0;
}

// found[m · stride + r] for rows n to n + R of a weight and M rows of x, each of K / 32 units. Pairs r · M + m of them lie in
// vectors of four.
template <class B, int R, int M>
void int8_dots(const Int8Rows<M>* x, const Int8Fours* fours, int64_t units, const LinearWeight& f, int64_t n, float* found, int64_t stride) {
    constexpr int kUnits = B::kNumbers / kUnit, kFours = (R * M + 3) / 4;
    using F = FormOf<B>;
    const int64_t row_bytes = f.row_bytes;
    const uint8_t* w = (const uint8_t*)f.weight + n * row_bytes;
    Four acc[kFours] = {}, least[kFours] = {};
    int64_t u = 0;
    if constexpr (R == 4 && M == 1) u = dots_of_four_rows<B>(x, fours, units, w, row_bytes, acc[0], least[0]), w += u / kUnits * B::kBytes;
    Given<B, R> given(f, n);
    for (; u < units; u += kUnits, w += B::kBytes) {
        given.blocks(w, row_bytes, u * kUnit, units * kUnit);
        PH_UNROLL(4) for (int r = 0; r < R; ++r) prefetch_block<B>(w + r * row_bytes);
        const auto blocks = wholes_at<B, R>([&](int r) { return w + r * row_bytes; }, given.at);
        PH_UNROLL(8) for (int j = 0; j < kUnits; ++j) {
            const Int8Rows<M>& by = x[u + j];
            LaneInts dot[4 * kFours] = {};
            PH_UNROLL(4) for (int r = 0; r < R; ++r) {
                const LaneInts codes = (LaneInts)unsigned_codes<F>(blocks[r].codes(j));
                PH_UNROLL(4) for (int m = 0; m < M; ++m) dot[r * M + m] = quad_dots<F>(F::kStart ? by.start[m] : LaneInts{}, codes, (LaneInts)by.codes[m]);
            }
            PH_UNROLL(4) for (int i = 0; i < kFours; ++i) {
                auto lanes = [&](auto of) {  // for each pair what its row of blocks has
                    auto at = [&](int lane) { return of(blocks[(4 * i + lane) / M < R ? (4 * i + lane) / M : R - 1]); };
                    return Four{at(0), at(1), at(2), at(3)};
                };
                FourInts first, second;
                sums_of(dot + 4 * i, first, second);
                if constexpr (F::kScales == 1) first += second;
                const Four scale = lanes([&](const Whole<B>& b) { return b.scale(j, 0); });
                acc[i] = add_product(acc[i], __builtin_convertvector(first, Four) * scale, by.scale);
                if constexpr (F::kScales == 2) {
                    const Four other = lanes([&](const Whole<B>& b) { return b.scale(j, 1); });
                    acc[i] = add_product(acc[i], __builtin_convertvector(second, Four) * other, by.scale);
                }
                PH_UNROLL(2) for (int h = 0; h < F::kMinima; ++h)
                    least[i] = add_product(least[i], lanes([&](const Whole<B>& b) { return b.minimum(j, h); }), total_of<F>(by, h));
            }
        }
    }
    PH_UNROLL(4) for (int r = 0; r < R; ++r)
        PH_UNROLL(4) for (int m = 0; m < M; ++m) found[m * stride + r] = acc[(r * M + m) / 4][(r * M + m) % 4] + least[(r * M + m) / 4][(r * M + m) % 4];
}

// The same for rows n to n + count of a weight, whatever its type.
template <int M>
void dots_of_blocks(const Int8Rows<M>* x, const Int8Fours* fours, int64_t units, const LinearWeight& f, int64_t n, int64_t count, float* found, int64_t stride) {
    with_whole(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        // Short blocks without minima leave registers for more rows, which read x once.
        constexpr int R = M == 1 ? kRowsAtOnce : PH_WIDTH < 16 || FormOf<B>::kMinima || B::kNumbers > kUnit ? 1 : 4;
        int64_t r = 0;
        for (; r + R <= count; r += R) int8_dots<B, R, M>(x, fours, units, f, n + r, found + r, stride);
        for (; r < count; ++r) int8_dots<B, 1, M>(x, fours, units, f, n + r, found + r, stride);
    });
}

// done(n, count, dots[m · stride + i] of row n + i of a weight with row m of the M rows of x, K numbers each) until n is
// `last`. More rows of x are lanes (int8_lanes.h).
template <int M, class Done>
void over_rows_int8(const float* x, int64_t K, const LinearWeight& f, int64_t first, int64_t last, int64_t stride, Done&& done) {
    const int64_t units = K / kUnit;
    auto* by = (Int8Rows<M>*)__builtin_alloca_with_align(units * sizeof(Int8Rows<M>), 8 * alignof(Int8Rows<M>));
    bool in_fours = false;
    with_whole(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        in_fours = M == 1 && kInFours<B>;
        int8_rows_of(x, units, FormOf<B>::kStart, FormOf<B>::kMinima == 2, by);
    });
    Int8Fours* fours = nullptr;
    if (in_fours) {
        fours = (Int8Fours*)__builtin_alloca_with_align(units / 4 * sizeof(Int8Fours), 8 * alignof(Int8Fours));
        int8_fours_of((const Int8Rows<1>*)by, units / 4, fours);
    }
    const int64_t most = M == 1 ? 4 * stride : stride;
    float* found = (float*)__builtin_alloca(M * most * sizeof(float));
    for (int64_t n = first, count; n < last; n += count) {
        count = last - n < most ? last - n : most;
        dots_of_blocks(by, fours, units, f, n, count, found, most);
        done(n, count, found);
    }
}

}  // namespace polyhead::PH_NAMESPACE
