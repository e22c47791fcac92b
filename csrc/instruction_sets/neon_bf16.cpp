// ARM with products of bytes and of pairs of bfloat16.
#define PH_WIDTH 4
#define PH_NAMESPACE neon_bf16
#include "all.h"
