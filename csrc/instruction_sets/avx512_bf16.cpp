// x86-64 with AVX-512 and its bfloat16 products.
#define PH_WIDTH 16
#define PH_NAMESPACE avx512_bf16
#include "all.h"
