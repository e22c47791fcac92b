// Which codes this processor runs. The module asks, and so does setup.py before it compiles; no file that is
// compiled for one processor includes it, as its functions run on every processor.
#pragma once

#include "../common/look_ahead.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace polyhead {

#if defined(__x86_64__)
// Haswell, Zen and later. Not every clang knows F16C by name.
inline bool runs_avx2() {
    unsigned a, b, c, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// Skylake servers and later.
inline bool runs_avx512() {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Zen 4, Sapphire Rapids and later.
inline bool runs_avx512_bf16() {
    return runs_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

#if defined(PH_TILE_MODEL)
inline bool has_tiles() { return true; }
#elif defined(SYS_arch_prctl) && __has_include(<amxtileintrin.h>)
// Whether the processor has tiles, and Linux lets this process use their registers, for which it has to
// be asked once.
inline bool has_tiles() {
    constexpr int kAskForState = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool bfloat16 = d >> 22 & 1, tiles = d >> 24 & 1;
    return bfloat16 && tiles && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#else
// A system without such a question, or a compiler too old to know tiles.
inline bool has_tiles() { return false; }
#endif

// Sapphire Rapids and later.
inline bool runs_avx512_amx() {
    static const bool found = runs_avx512_bf16() && has_tiles();
    return found;
}
#endif

#if defined(__aarch64__)
#if defined(__linux__)
inline bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }    // HWCAP_ASIMDDP
inline bool has_matrices() { return getauxval(AT_HWCAP2) >> 13 & getauxval(AT_HWCAP2) >> 14 & 1; }  // HWCAP2_I8MM, HWCAP2_BF16
#elif defined(__APPLE__)
inline bool has_feature(const char* name) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found;
}
inline bool has_dot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_matrices() { return has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16"); }
#else
inline bool has_dot() { return false; }
inline bool has_matrices() { return false; }
#endif
// Neoverse N1, Apple M1 and later.
inline bool runs_neon_dot() { return has_dot(); }
// Neoverse V1, Apple M2 and later.
inline bool runs_neon_bf16() { return has_dot() && has_matrices(); }
#endif

// How decoding looks ahead here. By its second cache a Zen 4 decodes 1.2 to 1.4 times as fast and an Intel Xeon with tiles
// 1.08 times; a Zen 5 (AMD's family 26) decodes faster by its first. Other processors were not measured.
inline LookAhead look_ahead_of_processor() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 26)
        return kIntoFirstCache;
#endif
    return kIntoSecondCache;
}

inline bool runs_portable() { return true; }

// Every code there is, the best first.
#if defined(__x86_64__)
#define PH_EVERY_CODE(X) X(avx512_amx) X(avx512_bf16) X(avx512) X(avx2) X(portable)
#elif defined(__aarch64__)
#define PH_EVERY_CODE(X) X(neon_bf16) X(neon_dot) X(portable)
#else
#define PH_EVERY_CODE(X) X(portable)
#endif

}  // namespace polyhead
