// x86-64 with AVX-512.
#define PH_WIDTH 16
#define PH_NAMESPACE avx512
#include "all.h"
