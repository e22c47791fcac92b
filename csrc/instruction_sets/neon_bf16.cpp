// ARM with products of bytes and of bfloat16, of pairs and of matrices.
#define PH_WIDTH 4
#define PH_NAMESPACE neon_bf16
#include "all.h"
