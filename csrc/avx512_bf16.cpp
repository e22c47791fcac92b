// x86-64 with AVX-512 and its bfloat16 products (Zen 4, Sapphire Rapids and later).
static bool runs_here() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"); }
#define PH_WIDTH 16
#define PH_NAMESPACE avx512_bf16
#define PH_CODE avx512_bf16_code
#define PH_NAME "avx512_bf16"
#define PH_RUNS_HERE runs_here
#include "code.h"
