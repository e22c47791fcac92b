// x86-64 with AVX-512, bfloat16 products and matrix tiles (Sapphire Rapids and later).
#include <cpuid.h>
#include <unistd.h>
#include <sys/syscall.h>
#include "native.h"

#if defined(PH_TILE_MODEL)
static bool has_tiles() { return true; }
#elif defined(SYS_arch_prctl) && __has_include(<amxtileintrin.h>)
// Whether the processor has tiles, and Linux lets this process use their registers, for which it has to
// be asked once.
static bool has_tiles() {
    constexpr int kAskForState = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool bfloat16 = d >> 22 & 1, tiles = d >> 24 & 1;
    return bfloat16 && tiles && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#else
// A system without such a question, or a compiler too old to know tiles.
#define PH_TILE_MODEL 1
static bool has_tiles() { return false; }
#endif

static bool runs_here() {
    static const bool found = polyhead::avx512_bf16_code.runs_here() && has_tiles();
    return found;
}
#define PH_TILES 1
#define PH_WIDTH 16
#define PH_NAMESPACE avx512_amx
#define PH_CODE avx512_amx_code
#define PH_NAME "avx512_amx"
#define PH_RUNS_HERE runs_here
#include "code.h"
