// x86-64 with AVX-512.
#define PH_WIDTH 16
#define PH_NAMESPACE avx512
#define PH_CODE avx512_code
#define PH_NAME "avx512"
#include "all.h"
