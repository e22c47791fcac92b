from collections.abc import Iterable, Mapping
from typing import Any

from gguf_files import GgufCase, choice_bias, paired
from harness import TIED, Case, ropes
from torch import Tensor

_QWEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DENSE = ({}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})

_SCALED = {
    kind: {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0}
    | {"original_max_position_embeddings": 16}
    for kind, theta in (("full_attention", 500.0), ("sliding_attention", 100.0))
}
_ROPES_BY_KIND = (
    {},
    {"rope_parameters": _SCALED},
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
    },
)


def _experts(config: Any) -> Mapping[str, Any]:
    return {"expert_count": config.num_local_experts}


def _qwen(config: Any) -> Mapping[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", None
        ),
    }


def _minimax(config: Any) -> Mapping[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
        "rope.dimension_count": config.rotary_dim,
    }


def _olmoe(config: Any) -> Mapping[str, Any]:
    return {"expert_count": config.num_experts, "attention.clamp_kqv": config.clip_qkv}


def _granite(config: Any) -> Mapping[str, Any]:
    return {
        **_experts(config),
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _cut(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Granite's gate and up are one tensor in Hugging Face's files."""
    if "input_linear" not in name:
        yield from paired(name, tensor, config)
        return
    layer = name.split(".")[2]
    for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
        yield f"blk.{layer}.ffn_{part}_exps.weight", half


def _apart(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Files of 2023 have a tensor for every expert."""
    stem, found, kind = name.partition(".experts.")
    if not found:
        yield from paired(name, tensor, config)
        return
    part = {"w1.weight": "gate", "w2.weight": "down", "w3.weight": "up"}[kind]
    for j, expert in enumerate(tensor):
        yield f"blk.{stem.split('.')[2]}.ffn_{part}.{j}.weight", expert


def _squeezed(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Converters of 2024 drop dimensions of size 1."""
    yield name, tensor.squeeze()


CASES = (
    Case(
        "mixtral",
        {"num_local_experts": 5, "head_dim": 8},  # scaled rotary types fail there without head_dim
        axes=(
            TIED,
            ({}, {"num_experts_per_tok": 3}, {"num_key_value_heads": 4}),
            ({}, {"sliding_window": 7}),
            ropes(8),
        ),
        gguf=GgufCase("llama", _experts, paired),
        more_gguf=(GgufCase("llama", _experts, _apart),),
    ),
    Case(
        "qwen2_moe",
        {**_QWEN, "num_experts": 5, "shared_expert_intermediate_size": 28},
        axes=(
            TIED,
            _DENSE,
            ({}, {"norm_topk_prob": True}, {"qkv_bias": False}),
            ({}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ),
        gguf=GgufCase("qwen2moe", _qwen),
        more_gguf=(GgufCase("qwen2moe", _qwen, _squeezed),),
    ),
    Case(
        "qwen3_moe",
        {**_QWEN, "num_local_experts": 5},
        axes=(
            TIED,
            _DENSE,
            ({}, {"norm_topk_prob": True}, {"attention_bias": True}, {"head_dim": 12}),
            ({}, {"use_sliding_window": True, "sliding_window": 7}),
        ),
        gguf=GgufCase("qwen3moe", _qwen, options={"norm_topk_prob": True, "head_dim": 12}),
        more_gguf=(
            GgufCase(
                "qwen3vlmoe",
                lambda config: {**_qwen(config), "rope.dimension_sections": [2, 1, 1, 0]},
                options={"norm_topk_prob": True},
            ),
        ),
    ),
    Case(
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12},
        axes=(TIED, ({}, {"rotary_dim": 8}, {"num_key_value_heads": 4})),
        gguf=GgufCase("minimax-m2", _minimax, choice_bias, {"rotary_dim": 8}),
    ),
    Case(
        "olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2},
        axes=(
            TIED,
            ({}, {"norm_topk_prob": True}, {"attention_bias": True}),
            ({}, {"clip_qkv": 0.4}),
        ),
        gguf=GgufCase("olmoe", _olmoe, options={"clip_qkv": 0.4}),
    ),
    Case(
        "granitemoe",
        {
            "num_local_experts": 5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        axes=(TIED, ({}, {"attention_bias": True}, {"num_experts_per_tok": 3})),
        gguf=GgufCase("granitemoe", _granite, _cut),
    ),
    Case(
        "mellum",
        {**_QWEN, "num_local_experts": 5, "sliding_window": 7, "num_hidden_layers": 3},
        axes=(
            TIED,
            ({}, {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
            ({}, {"norm_topk_prob": False}, {"attention_bias": True}, {"head_dim": 12}),
            (
                {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
                {},
                {"layer_types": ["sliding_attention"] * 3},
            ),
            _ROPES_BY_KIND,
        ),
    ),
    Case(
        "kolibri1",
        {
            **_QWEN,
            "intermediate_size": None,
            "num_experts": 5,
            "shared_expert_intermediate_size": 28,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "head_dim": 12,
        },
        axes=(
            TIED,
            ({}, {"norm_topk_prob": True}, {"num_key_value_heads": 4}),
            (
                {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
                {},
                {"layer_types": ["full_attention"] * 3},
            ),
            ropes(12),
        ),
    ),
    Case(
        "flint",
        {
            **_QWEN,
            "num_experts": 5,
            "shared_expert_intermediate_size": 28,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "head_dim": 12,
        },
        axes=(
            TIED,
            (*_DENSE, {"mlp_only_layers": []}),
            ({}, {"norm_topk_prob": False}, {"attention_bias": True}),
            ({}, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
            ropes(12),
        ),
    ),
)
