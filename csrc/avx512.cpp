// x86-64 with AVX-512 (Skylake servers and later).
static bool runs_here() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"); }
#define PH_WIDTH 16
#define PH_NAMESPACE avx512
#define PH_CODE avx512_code
#define PH_NAME "avx512"
#define PH_RUNS_HERE runs_here
#include "code.h"
