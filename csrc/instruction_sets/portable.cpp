// Any processor: vectors of four, which are SSE2 on x86-64 and NEON on ARM.
#define PH_WIDTH 4
#define PH_NAMESPACE portable
#include "all.h"
