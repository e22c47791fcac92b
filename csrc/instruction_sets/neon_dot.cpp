// ARM with products of bytes.
#define PH_WIDTH 4
#define PH_NAMESPACE neon_dot
#include "all.h"
