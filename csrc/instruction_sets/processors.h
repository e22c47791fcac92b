// Which codes this processor runs. The module asks, and so does setup.py before it compiles; no file that is
// compiled for one processor includes it, as its functions run on every processor.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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

inline bool runs_portable() { return true; }

// Every code there is, the best first.
#if defined(__x86_64__)
#define PH_EVERY_CODE(X) X(avx512_amx) X(avx512_bf16) X(avx512) X(avx2) X(portable)
#else
#define PH_EVERY_CODE(X) X(portable)
#endif

}  // namespace polyhead
