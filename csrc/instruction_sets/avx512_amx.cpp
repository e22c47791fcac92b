// x86-64 with AVX-512, bfloat16 products and matrix tiles.
#include <sys/syscall.h>
#if !defined(PH_TILE_MODEL) && !(defined(SYS_arch_prctl) && __has_include(<amxtileintrin.h>))
#define PH_TILE_MODEL 1  // never run: processors.h
#endif
#define PH_TILES 1
#define PH_WIDTH 16
#define PH_NAMESPACE avx512_amx
#include "all.h"
