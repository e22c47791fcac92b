// Vectors of one instruction set, as the compiler's own vector types, and the storage types.
//
// Included by one file per instruction set, inside that file's own namespace, so that nothing that
// was compiled for one processor is linked into the path of another.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"

// An editor that reads one header alone sees the code of any processor.
#if !defined(PH_WIDTH)
#define PH_WIDTH 4
#define PH_NAMESPACE portable
#endif

#define PH_PRAGMA(text) _Pragma(#text)
#define PH_UNROLL(times) PH_PRAGMA(GCC unroll times)

namespace polyhead::PH_NAMESPACE {

typedef float Vec __attribute__((vector_size(4 * PH_WIDTH)));
typedef int32_t VecInt __attribute__((vector_size(4 * PH_WIDTH)));
typedef uint32_t VecWord __attribute__((vector_size(4 * PH_WIDTH)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * PH_WIDTH)));

constexpr int W = PH_WIDTH;

template <class V> inline V load_any(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
template <class V> inline void store_any(void* p, V v) { __builtin_memcpy(p, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }
inline VecInt splat_int(int32_t x) { return x - VecInt{}; }
// 0, 1, 2, …
inline VecInt counted() {
    VecInt found;
    for (int i = 0; i < W; ++i) found[i] = i;
    return found;
}
// sum + a · b, rounded once where the processor can: everywhere alike, whatever surrounds it.
#if defined(__AVX512F__) && PH_WIDTH == 16
inline Vec multiply_add(Vec sum, Vec a, Vec b) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
#elif defined(__FMA__) && PH_WIDTH == 8
inline Vec multiply_add(Vec sum, Vec a, Vec b) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
#else
inline Vec multiply_add(Vec sum, Vec a, Vec b) { return sum + a * b; }
#endif
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float multiply_add(float sum, float a, float b) { return __builtin_fmaf(a, b, sum); }
#else
inline float multiply_add(float sum, float a, float b) { return sum + a * b; }
#endif
inline Vec choose(VecInt where, Vec yes, Vec no) {
    return (Vec)((where & (VecInt)yes) | (~where & (VecInt)no));
}

// 16-bit floats as bits; conversion is exact one way and rounds to nearest even the other.
struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

inline Vec load(const float* p) { return load_any<Vec>(p); }
inline Vec load(const BFloat16* p) {
    return (Vec)(__builtin_convertvector(load_any<VecHalf>(p), VecInt) << 16);
}
inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}
inline float to_float(Half x) {
    // The exponent is moved by multiplication, which also makes subnormal numbers normal.
    uint32_t bits = (uint32_t)(x.bits & 0x7fff) << 13;
    if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    if ((x.bits & 0x7c00) != 0x7c00) f *= 0x1p112f;
    return (x.bits & 0x8000) ? -f : f;
}
#if defined(__F16C__) && PH_WIDTH == 16
inline Vec load(const Half* p) { return (Vec)_mm512_cvtph_ps(load_any<__m256i>(p)); }
#elif defined(__F16C__) && PH_WIDTH == 8
inline Vec load(const Half* p) { return (Vec)_mm256_cvtph_ps(load_any<__m128i>(p)); }
#elif defined(__aarch64__) && PH_WIDTH == 4
inline Vec load(const Half* p) { return (Vec)vcvt_f32_f16(load_any<float16x4_t>(p)); }
#else
inline Vec load(const Half* p) {
    Vec v;
    for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
    return v;
}
#endif

// W bytes as whole numbers.
#if defined(__AVX512F__) && PH_WIDTH == 16
inline VecInt load_bytes(const uint8_t* p) { return (VecInt)_mm512_cvtepu8_epi32(load_any<__m128i>(p)); }
inline VecInt load_signed_bytes(const uint8_t* p) { return (VecInt)_mm512_cvtepi8_epi32(load_any<__m128i>(p)); }
#elif defined(__AVX2__) && PH_WIDTH == 8
inline VecInt load_bytes(const uint8_t* p) { return (VecInt)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline VecInt load_signed_bytes(const uint8_t* p) { return (VecInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
inline VecInt load_bytes(const uint8_t* p) {
    VecInt v;
    for (int i = 0; i < W; ++i) v[i] = p[i];
    return v;
}
inline VecInt load_signed_bytes(const uint8_t* p) {
    VecInt v;
    for (int i = 0; i < W; ++i) v[i] = (int8_t)p[i];
    return v;
}
#endif

inline void round_to(float x, float* p) { *p = x; }
inline void round_to(float x, BFloat16* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) { p->bits = 0x7fc0; return; }
    p->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void round_to(float x, Half* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000u) { p->bits = sign | 0x7e00; return; }
    if (bits >= 0x477ff000u) { p->bits = sign | 0x7c00; return; }
    if (bits < 0x38800000u) {
        // Subnormal: adding 0.5 lines the result up with the last bits and rounds.
        float f;
        __builtin_memcpy(&f, &bits, 4);
        f += 0.5f;
        __builtin_memcpy(&bits, &f, 4);
        p->bits = sign | (uint16_t)(bits - 0x3f000000u);
        return;
    }
    bits += 0xfff + ((bits >> 13) & 1);
    p->bits = sign | (uint16_t)((bits - 0x38000000u) >> 13);
}

// The same for whole vectors.
inline VecInt bits_of_bfloat16(Vec x) {
    const VecWord bits = (VecWord)x;  // those of a NaN may wrap
    const VecInt nearest = (VecInt)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return (VecInt)choose((VecInt)(x == x), (Vec)nearest, (Vec)splat_int(0x7fc0));
}
template <class T> inline Vec rounded(Vec x);
template <> inline Vec rounded<float>(Vec x) { return x; }
template <> inline Vec rounded<BFloat16>(Vec x) { return (Vec)(bits_of_bfloat16(x) << 16); }
template <> inline Vec rounded<Half>(Vec x) {
    Half lanes[W];
    for (int i = 0; i < W; ++i) round_to(x[i], lanes + i);
    return load(lanes);
}
inline void store(Vec x, float* p) { store_any(p, x); }
inline void store(Vec x, BFloat16* p) {
    store_any(p, __builtin_convertvector(bits_of_bfloat16(x), VecHalf));
}
inline void store(Vec x, Half* p) {
    for (int i = 0; i < W; ++i) round_to(x[i], p + i);
}

// The first n of W numbers, the others 0.
template <class T> inline Vec load_some(const T* p, int64_t n) {
    if (n >= W) return load(p);
    T lanes[W] = {};
    __builtin_memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}

template <class T> inline void store_some(Vec x, T* p, int64_t n) {
    if (n >= W) return store(x, p);
    T lanes[W];
    store(x, lanes);
    __builtin_memcpy(p, lanes, n * sizeof(T));
}

#if defined(__AVX512DQ__) && PH_WIDTH == 16
inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline Vec smaller(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
inline uint32_t lanes_that_differ(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NEQ_UQ); }
inline float sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
inline float sum(Vec v) {
    float lanes[W];
    store_any(lanes, v);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    return lanes[0];
}
inline float largest(Vec v) {
    float lanes[W];
    store_any(lanes, v);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) lanes[i] = lanes[i + n] > lanes[i] ? lanes[i + n] : lanes[i];
    return lanes[0];
}
#endif

// 2^f for 0 ≤ f ≤ 1, fitted to 1e-7 relative; exact at 0.
inline Vec power_of_fraction(Vec f) {
    Vec p = splat(1.86713007e-3f);
    p = p * f + 9.01703032e-3f;
    p = p * f + 5.57999131e-2f;
    p = p * f + 2.4016445e-1f;
    p = p * f + 6.93151312e-1f;
    return p * f + 1.0f;
}

// 2^x is 2^n · 2^f with n whole. What would be smaller than the smallest normal number is 0, 2^−∞ too;
// NaN stays.
constexpr float kLeastPower = -126.0f;

inline Vec power_of_two(Vec x) {
#if defined(__AVX512DQ__) && PH_WIDTH == 16
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(kLeastPower), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)power_of_fraction(f), (__m512)x);
#else
    const Vec magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to a whole number
    const Vec shifted = (x - 0.5f) + magic;
    const Vec f = x - (shifted - magic);
    const VecInt power = ((VecInt)shifted << 23) + splat_int(0x3f800000);
    return choose((VecInt)(x < splat(kLeastPower)), Vec{}, power_of_fraction(f) * (Vec)power);
#endif
}

// exp for x ≤ 88, with an error of |x| · 1e-7 beside that of 2^x.
constexpr float kLog2OfE = 1.44269504f;
inline Vec exponential(Vec x) { return power_of_two(x * kLog2OfE); }

// tanh as x P(x²) / Q(x²), fitted to 2e-7 relative up to 8; what is farther out counts as 8, where tanh is
// 1 − 2e-7.
inline Vec hyperbolic_tangent(Vec x) {
    x = smaller(splat(8.0f), larger(splat(-8.0f), x));  // both give a NaN back, if that comes second
    const Vec s = x * x;
    Vec p = splat(1.1428419e-5f), q = splat(2.45920957e-7f);
    q = q * s + 2.38669106e-4f;
    p = p * s + 2.95102331e-3f;
    q = q * s + 2.38155521e-2f;
    p = p * s + 1.29256625e-1f;
    q = q * s + 4.62588781e-1f;
    p = p * s + 9.99999854e-1f;
    q = q * s + 1.0f;
    return x * p / q;
}

// Φ(x), the share of the normal distribution below x: exp(−t²/2) P(t) / Q(t) of t = |x|, fitted to 6e-9 relative up to
// 14.5, is the share beyond t. It keeps its relative precision far below 0, where 1 + erf would lose it.
inline Vec normal_distribution(Vec x) {
    const Vec t = smaller(splat(14.5f), larger(x, -x));  // gives a NaN back
    Vec p = splat(0.0041162958f), q = splat(0.0103179037f);
    q = q * t + 0.101858623f;
    p = p * t + 0.0406331393f;
    q = q * t + 0.469469956f;
    p = p * t + 0.183234883f;
    q = q * t + 1.20250209f;
    p = p * t + 0.438294613f;
    q = q * t + 1.67447421f;
    p = p * t + 0.500000003f;
    q = q * t + 1.0f;
    const Vec beyond = power_of_two(t * t * (-0.5f * kLog2OfE)) * p / q;
    return choose((VecInt)(x < Vec{}), beyond, 1.0f - beyond);
}

// Calls of(n as a constant) for 1 ≤ n ≤ Most.
template <int Most, class Of> inline void with_constant(int64_t n, const Of& of) {
    if constexpr (Most > 1)
        if (n < Most) return with_constant<Most - 1>(n, of);
    of(std::integral_constant<int, Most>{});
}

// Calls of(a number of the dtype).
template <class Of> inline auto with_dtype(Dtype dtype, const Of& of) {
    if (dtype == kFloat32) return of(float{});
    if (dtype == kBFloat16) return of(BFloat16{});
    return of(Half{});
}

}  // namespace polyhead::PH_NAMESPACE
