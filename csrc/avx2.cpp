// x86-64 with AVX2, FMA and F16C (Haswell, Zen and later). Not every clang knows F16C by name.
#include <cpuid.h>
static bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#define PH_WIDTH 8
#define PH_NAMESPACE avx2
#define PH_CODE avx2_code
#define PH_NAME "avx2"
#define PH_RUNS_HERE runs_here
#include "code.h"
