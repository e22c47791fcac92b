// x86-64 with AVX2 and FMA (Haswell, Zen and later).
static bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
#define PH_WIDTH 8
#define PH_NAMESPACE avx2
#define PH_CODE avx2_code
#define PH_NAME "avx2"
#define PH_RUNS_HERE runs_here
#include "code.h"
