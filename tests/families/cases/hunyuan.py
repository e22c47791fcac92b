from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase, interleaved, paired
from harness import TIED, Case, rope, ropes
from torch import Tensor

_ALPHA = rope(
    "dynamic", alpha=50.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
)


def _stretched(config: Any) -> dict[str, Any]:
    """The converter works alpha out."""
    size, rotary = config.head_dim, config.rope_parameters
    return {
        "rope.freq_base": rotary["rope_theta"] * rotary["alpha"] ** (size / (size - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256 * 1024,
        "context_length": 256 * 1024,
    }


def _of_pictures(config: Any) -> dict[str, Any]:
    """HunyuanVL's converter leaves alpha to the reader."""
    rotary = config.rope_parameters
    return {
        "rope.freq_base": rotary["rope_theta"],
        "rope.scaling.alpha": rotary["alpha"],
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": config.max_position_embeddings,
        "rope.dimension_sections": [1, 1, 1, 1],
    }


def _neighbours(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Maincoder's own order, which its converter keeps."""
    if "_layernorm" in name and "self_attn" in name:
        tensor = interleaved(tensor, 1)
    yield from paired(name, tensor, config)


def _experts(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.moe_topk,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
    }


CASES = (
    Case(
        "hunyuan_v1_dense",
        {"head_dim": 8},
        axes=(TIED, ({}, {"attention_bias": True}), (_ALPHA, {})),  # as published
        gguf=GgufCase("hunyuan-dense"),
        more_gguf=(
            GgufCase("hunyuan-dense", _stretched, options=_ALPHA),
            GgufCase("hunyuan_vl", _of_pictures, options=_ALPHA),
            GgufCase("hunyuan_vl"),
            GgufCase("maincoder", change=_neighbours),
        ),
    ),
    Case(
        "hunyuan_v1_moe",
        {"head_dim": 12, "num_experts": 5, "moe_topk": 2},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_key_value_heads": 4}),
            ({}, {"moe_topk": [1, 3]}, {"hidden_act": "gelu"}),
            (_ALPHA, *ropes(12)),
        ),
        gguf=GgufCase("hunyuan-moe", _experts, options={"head_dim": 8}),
        more_gguf=(
            GgufCase(
                "hunyuan-moe",
                lambda config: {**_experts(config), **_stretched(config)},
                options={"head_dim": 8, **_ALPHA},
            ),
        ),
    ),
    Case(
        "hy_v3",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "moe_intermediate_size": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            ({}, {"num_shared_experts": 2}, {"router_scaling_factor": 0.7}),
            (
                {},
                {"mlp_layer_types": ["sparse", "dense", "sparse"]},
                {"mlp_layer_types": ["sparse"] * 3},
                {"mlp_layer_types": ["dense"] * 3},
            ),
            ropes(12),
        ),
    ),
)
