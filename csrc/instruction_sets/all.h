// The code of one instruction set: PH_WIDTH lanes, in namespace PH_NAMESPACE.
#pragma once

#include "../attention/choose_keys.h"
#include "../attention/gradients.h"
#include "../attention/statistics.h"
#include "../decode/step.h"
#include "../products/gemm_network.h"
#include "../recurrence/recur.h"
#include "../training/elementwise.h"
#include "code.h"

#define PH_DEFINE_CODE(name) \
    const Code name##_code = { \
        #name, name::gemv, name::gemm, name::unpack, name::feed_forward, name::gemm_network, name::norm, name::rotate, \
        name::head_product, name::widened, name::attend, name::gradients, name::tile_sums, name::step, name::route, \
        name::sink, name::choose_blocks, name::choose_keys, name::gated, name::dropped, name::norm_gradients, name::recur};
#define PH_DEFINE(name) PH_DEFINE_CODE(name)

namespace polyhead {

PH_DEFINE(PH_NAMESPACE)

}  // namespace polyhead
