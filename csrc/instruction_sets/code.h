// What the code of one instruction set offers to the module.
#pragma once

#include "../decode/arguments.h"
#include "../recurrence/arguments.h"
#include "../training/arguments.h"

namespace polyhead {

// The code of one instruction set.
struct Code {
    const char* name;
    void (*gemv)(const Gemv&, int threads);
    void (*gemm)(const Gemm&, int threads);
    void (*unpack)(const Unpacked&, int threads);
    void (*feed_forward)(const FeedForward&, int threads);
    void (*gemm_network)(const GemmNetwork&, int threads);
    void (*norm)(const Norm&, int threads);
    void (*rotate)(const Rotation&, int threads);
    void (*head_product)(const HeadProduct&, int threads);
    void (*widen)(Dtype, const void* from, int64_t stride, int64_t rows, int64_t K, float* to);
    Outcome (*attend)(const Attention&, int threads);
    Outcome (*gradients)(const Gradients&, int threads);
    void (*tile_sums)(const Tile&, int threads);
    Outcome (*step)(const Step&, int threads);
    void (*route)(const Route&, int threads);
    void (*sink)(const Sinks&, int threads);
    void (*choose_blocks)(const BlockChoice&, int threads);
    Outcome (*choose_keys)(const KeyChoice&, int threads);
    void (*gated)(const Gated&, int threads);
    void (*dropped)(const Elements&, int threads);
    void (*norm_gradients)(const NormGradients&, int threads);
    void (*recur)(const Recurrence&, int threads);
};

#if defined(__x86_64__)
extern const Code avx512_amx_code, avx512_bf16_code, avx512_code, avx2_code;
#elif defined(__aarch64__)
extern const Code neon_bf16_code, neon_dot_code;
#endif
extern const Code portable_code;

}  // namespace polyhead
