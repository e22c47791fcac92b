// x86-64 with AVX2, FMA and F16C.
#define PH_WIDTH 8
#define PH_NAMESPACE avx2
#include "all.h"
