from typing import Any

from gguf_files import GgufCase
from gguf_recurrent import kimi, kimi_settings
from harness import Case, ropes

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 20,
    "num_local_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_STATED = {
    "layer_types": None,
    "linear_attn_config": {
        "head_dim": 24,
        "num_heads": 3,
        "short_conv_kernel_size": 3,
        "full_attn_layers": [1, 3],
        "kda_layers": [2],
    },
}
_PLAIN = {"linear_num_heads": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7}

CASES = (
    Case(
        "kimi_linear",
        _SIZES,
        axes=(
            ({}, {"q_lora_rank": 24}, {"attention_bias": True}),
            ({}, {"mlp_layer_types": ["sparse", "dense", "dense"]}, {"norm_topk_prob": False}),
            ({}, {"linear_conv_kernel_dim": 2}, _STATED),
        ),
        tokens=80,
        gguf=GgufCase("kimi-linear", kimi_settings, kimi, _PLAIN, written=False),
    ),
    Case(
        "bailing_hybrid",
        {
            **{key: each for key, each in _SIZES.items() if not key.startswith("linear_")},
            "head_dim": 32,
            "num_local_experts": 6,
            "n_group": 2,
            "topk_group": 1,
        },
        axes=(
            ({}, {"attention_bias": True}, {"kda_safe_gate": False}, {"kda_lower_bound": -2.0}),
            ({}, {"mlp_layer_types": ["sparse", "dense", "dense"]}, {"norm_topk_prob": False}),
            ({}, {"short_conv_kernel_size": 2}, {"layer_types": None, "layer_group_size": 2}),
            # transformers writes the base twice
            tuple({**each, "rope_theta": 500.0} if each else each for each in ropes(4)),
        ),
        tokens=80,
        # Decays down to e^-5 a token cost transformers' chunks digits.
        error=3e-4,
        gradient_error=1e-3,
    ),
)
