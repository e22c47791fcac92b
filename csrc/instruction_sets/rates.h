// What this processor does at most: chains of one instruction whose operands stay in registers, and plain
// reads. Benchmarks compare with it, and setup.py asks which instructions are worth a code of their own.
// Compiled for every processor: each function names what it needs, and is called where that runs.
#pragma once

#include <cstdint>

#include "processors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polyhead {

// One instruction: its name, whether it runs here, and a function that does some rounds and returns the operations.
struct Rate {
    const char* name;
    bool (*runs_here)();
    double (*compute)(int64_t rounds);
};

// Reads some bytes, a multiple of 512.
struct Reader {
    bool (*runs_here)();
    void (*read)(const char* from, int64_t bytes);
};

constexpr int kChains = 12;  // more than any latency times the units that work side by side

#if defined(__x86_64__)
#define PH_CHAIN(name, target_, Register, first, a, b, next, operations) \
    __attribute__((target(target_), noinline)) inline double name(int64_t rounds) { \
        Register sums[kChains]; \
        for (int i = 0; i < kChains; ++i) sums[i] = first; \
        const auto x = a, y = b; \
        for (int64_t n = 0; n < rounds; ++n) { \
            _Pragma("GCC unroll 12") for (int i = 0; i < kChains; ++i) sums[i] = next(sums[i], x, y); \
        } \
        for (int i = 0; i < kChains; ++i) asm volatile("" : : "v"(sums[i])); \
        return (double)rounds * kChains * (operations); \
    }
#define PH_FMA_256(sum, x, y) _mm256_fmadd_ps(x, y, sum)
#define PH_FMA_512(sum, x, y) _mm512_fmadd_ps(x, y, sum)
PH_CHAIN(fma_256, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1.5f), _mm256_set1_ps(1e-9f), PH_FMA_256, 2 * 8)
PH_CHAIN(fma_512, "avx512f", __m512, _mm512_setzero_ps(), _mm512_set1_ps(1.5f), _mm512_set1_ps(1e-9f), PH_FMA_512, 2 * 16)
PH_CHAIN(bf16_pairs, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(), (__m512bh)_mm512_set1_epi16(0x3fc0),
         (__m512bh)_mm512_set1_epi16(0x3080), _mm512_dpbf16_ps, 4 * 16)
PH_CHAIN(int8_quads, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_set1_epi8(1),
         _mm512_dpbusd_epi32, 8 * 16)
#undef PH_FMA_256
#undef PH_FMA_512
#undef PH_CHAIN

#if !defined(PH_TILE_MODEL) && defined(SYS_arch_prctl) && __has_include(<amxtileintrin.h>)
#define PH_TILE_RATES {"bf16_tiles", runs_avx512_amx, bf16_tiles}, {"int8_tiles", runs_avx512_amx, int8_tiles},
// Products of whole matrix tiles, of so many numbers a row.
#define PH_TILE_CHAIN(name, instruction, numbers) \
    inline double name(int64_t rounds) { \
        alignas(64) uint8_t form[64] = {1}; /* palette; from byte 16 on bytes of a row of each tile, from 48 on rows */ \
        for (int i = 0; i < 8; ++i) form[16 + 2 * i] = 64, form[48 + i] = 16; \
        asm volatile("ldtilecfg %0\n\ttilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7\n\t" \
                     "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : : "m"(form)); \
        for (int64_t n = 0; n < rounds; ++n) \
            _Pragma("GCC unroll 3") for (int i = 0; i < kChains; i += 4) \
                asm volatile(instruction " %tmm6, %tmm4, %tmm0\n\t" instruction " %tmm7, %tmm4, %tmm1\n\t" \
                             instruction " %tmm6, %tmm5, %tmm2\n\t" instruction " %tmm7, %tmm5, %tmm3"); \
        asm volatile("tilerelease"); \
        return (double)rounds * kChains * (2 * 16 * 16 * numbers); \
    }
PH_TILE_CHAIN(bf16_tiles, "tdpbf16ps", 32)
PH_TILE_CHAIN(int8_tiles, "tdpbssd", 64)
#undef PH_TILE_CHAIN
#else
#define PH_TILE_RATES
#endif

#define PH_READS(name, target_, Register, load, mix) \
    __attribute__((target(target_), noinline)) inline void name(const char* from, int64_t bytes) { \
        Register sums[8] = {}; \
        constexpr int64_t kWidth = sizeof(Register); \
        for (int64_t at = 0; at < bytes; at += 8 * kWidth) { \
            _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) \
                sums[i] = mix(sums[i], load((const Register*)(from + at + i * kWidth))); \
        } \
        for (int i = 0; i < 8; ++i) asm volatile("" : : "v"(sums[i])); \
    }
PH_READS(read_256, "avx2", __m256i, _mm256_loadu_si256, _mm256_xor_si256)
PH_READS(read_512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_xor_si512)
#undef PH_READS

const Rate kRates[] = {
    {"fma_256", runs_avx2, fma_256},
    {"fma_512", runs_avx512, fma_512},
    {"bf16_pairs", runs_avx512_bf16, bf16_pairs},
    {"int8_quads", runs_avx512_bf16, int8_quads},
    PH_TILE_RATES
};
#undef PH_TILE_RATES
const Reader kReaders[] = {{runs_avx512, read_512}, {runs_avx2, read_256}};
#else
const Rate kRates[] = {{"", [] { return false; }, nullptr}};
const Reader kReaders[] = {{[] { return false; }, nullptr}};
#endif

}  // namespace polyhead
