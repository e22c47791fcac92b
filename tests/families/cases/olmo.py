from typing import Any

from gguf_files import GgufCase, paired
from harness import TIED, Case, rope, ropes

from cases.llama_like import windows

_KINDS = ["sliding_attention", "full_attention"]


def _clipped(config: Any) -> dict[str, Any]:
    return {"attention.clamp_kqv": config.clip_qkv, "attention.layer_norm_epsilon": 1e-5}


CASES = (
    Case(
        "olmo",
        axes=(
            TIED,
            ({}, {"clip_qkv": 0.4}, {"attention_bias": True}),
            ({}, {"num_key_value_heads": None}),
            ropes(8),
        ),
        gguf=GgufCase("olmo", _clipped, paired, {"clip_qkv": 0.4}),
    ),
    Case(
        "olmo2",
        axes=(TIED, ({}, {"attention_bias": True}, {"num_key_value_heads": 4}), ropes(8)),
        gguf=GgufCase("olmo2"),
    ),
    Case(
        "olmo3",
        {"sliding_window": 7},
        axes=(TIED, ({}, {"layer_types": _KINDS}, {"attention_bias": True})),
        gguf=GgufCase("olmo2", windows, options={"layer_types": _KINDS}),
    ),
    Case(
        "flex_olmo",
        {"num_experts": 5, "num_experts_per_tok": 2},
        axes=(
            TIED,
            ({}, {"norm_topk_prob": True}, {"attention_bias": True}),
            ({}, {"num_key_value_heads": None}, {"num_experts_per_tok": 3}),
            ropes(8),
        ),
    ),
    Case(
        "olmo_hybrid",
        {
            "num_hidden_layers": 3,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 6,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "max_position_embeddings": 128,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"linear_conv_kernel_dim": 2}),
            ({}, {"linear_allow_neg_eigval": False}, {"layer_types": None}),
            ({}, {"linear_num_key_heads": None, "linear_value_head_dim": None}),
            ({}, rope("linear", factor=4.0), {"rope_parameters": None}),
        ),
        tokens=80,
    ),
)
