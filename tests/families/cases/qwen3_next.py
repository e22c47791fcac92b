from typing import Any

from gguf_files import GgufCase
from gguf_recurrent import (
    delta_net,
    drafting,
    fused_experts,
    joined_delta_net,
    next_settings,
    tiled_delta_net,
)
from harness import TIED, Case, rope

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
_PUBLISHED = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
"""Keys of published files that transformers does not read."""
_EXPERTS = {
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
_SPARSE = {**_SIZES, **_EXPERTS, "intermediate_size": None}
_SECTIONS = rope(
    "default", partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True
)
_TOKENS = 80  # transformers takes states in chunks of 64
# In float32 its logits are then, over all options, up to 4.0e-4 standard deviations from our model
# in float64 where there are experts (ours in float32 2.0e-4), and 6.1e-5 without (3.5e-5). The
# gradients of the two in float32 differ by up to 3.8e-4.
_FAR: dict[str, Any] = {"tokens": _TOKENS, "error": 6e-4, "gradient_error": 6e-4}


def _with_sections(config: Any) -> dict[str, Any]:
    return {**next_settings(config), "rope.dimension_sections": [11, 11, 10, 0]}


CASES = (
    Case(
        "qwen3_next",
        {**_SIZES, **_EXPERTS},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"linear_conv_kernel_dim": 2}),
            ({}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"norm_topk_prob": False}),
            ({}, {"layer_types": None, "num_hidden_layers": 4, "full_attention_interval": 2}),
            ({}, rope("default", partial_rotary_factor=1.0)),
        ),
        gguf=GgufCase("qwen3next", next_settings, delta_net),
        more_gguf=(GgufCase("qwen3next", next_settings, joined_delta_net),),
        # Not 80: two experts of a token would differ by 9e-7 there, less than float32 rounds.
        **(_FAR | {"tokens": 81}),
    ),
    Case(
        "qwen3_5_text",
        _SIZES | _PUBLISHED,
        axes=(TIED, ({}, {"attention_bias": True}), ({}, _SECTIONS)),
        tokens=_TOKENS,
        error=1e-4,
        gguf=GgufCase("qwen35", _with_sections, tiled_delta_net),
    ),
    Case(
        "qwen3_5_moe_text",
        _SPARSE | _PUBLISHED,
        axes=(TIED, ({}, {"num_experts_per_tok": 1}), ({}, _SECTIONS)),
        gguf=GgufCase("qwen35moe", _with_sections, tiled_delta_net),
        more_gguf=(
            GgufCase(
                "qwen35moe",
                lambda config: {**_with_sections(config), **drafting(config)},
                fused_experts(tiled_delta_net),
            ),
        ),
        **_FAR,
    ),
)
