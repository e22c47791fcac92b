from typing import Any

from harness import TIED, Case, rope

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
_CONV = ({}, {"conv_bias": True}, {"conv_L_cache": 2}, {"conv_L_cache": 5})
_ROPE = ({}, rope("linear", factor=4.0))

CASES = (
    Case(
        "lfm2",
        {**_SIZES, "block_multiple_of": 8},
        axes=(
            TIED,
            _CONV,
            ({}, {"layer_types": None, "full_attn_idxs": [0, 2]}, {"layer_types": None}),
            ({}, {"block_auto_adjust_ff_dim": False}, {"block_ffn_dim_multiplier": 1.7}),
            _ROPE,
        ),
    ),
    Case(
        "lfm2_moe",
        {
            **_SIZES,
            "moe_intermediate_size": 20,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        axes=(
            TIED,
            _CONV,
            ({}, {"num_dense_layers": 0}, {"use_expert_bias": False}, {"norm_topk_prob": False}),
            ({}, {"routed_scaling_factor": 1.7}),
            _ROPE,
        ),
    ),
)
