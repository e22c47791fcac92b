// The code of one instruction set: PH_WIDTH lanes, in namespace PH_NAMESPACE, exported as PH_CODE.
#pragma once

#include "../attention/gradients.h"
#include "../attention/statistics.h"
#include "../decode/step.h"
#include "../products/gemm_network.h"
#include "../training/elementwise.h"
#include "code.h"

#if defined(PH_CODE)
namespace polyhead {

extern const Code PH_CODE;
const Code PH_CODE = {
    PH_NAME, PH_NAMESPACE::gemv, PH_NAMESPACE::gemm, PH_NAMESPACE::unpack, PH_NAMESPACE::feed_forward,
    PH_NAMESPACE::gemm_network, PH_NAMESPACE::norm, PH_NAMESPACE::rotate, PH_NAMESPACE::head_product, PH_NAMESPACE::widened,
    PH_NAMESPACE::attend, PH_NAMESPACE::gradients, PH_NAMESPACE::tile_sums, PH_NAMESPACE::step, PH_NAMESPACE::route,
    PH_NAMESPACE::sink, PH_NAMESPACE::gated, PH_NAMESPACE::dropped, PH_NAMESPACE::norm_gradients,
};

}  // namespace polyhead
#endif
