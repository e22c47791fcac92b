"""Mixtures of experts that share a Llama-like body."""

from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase, choice_bias
from harness import TIED, Case, ropes
from torch import Tensor

from cases.llama_like import windows

_ERNIE = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "moe_num_experts": 5,
    "moe_k": 3,
    "num_hidden_layers": 3,
}
_KINDS = ["full_attention", "sliding_attention", "full_attention"]


def _ernie(config: Any) -> dict[str, Any]:
    """The converter's width of the shared experts is right for the published models alone."""
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
    }


def _afmoe(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.route_scale,
        "expert_weights_norm": True,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.num_dense_layers,
        "rope.dimension_count": config.head_dim,
    }


def _biased(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    yield name + (".bias" if name.endswith("expert_bias") else ""), tensor


def _exaone(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_shared_feed_forward_length": config.num_shared_experts
        * config.moe_intermediate_size,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
        "nextn_predict_layers": 0,
        "rope.scaling.type": "none",
        **windows(config),
    }


def _with_drafts(config: Any) -> dict[str, Any]:
    layers = config.num_hidden_layers + 1
    return {**_exaone(config), "block_count": layers, "nextn_predict_layers": 1}


def _drafting(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """One more layer, which predicts further tokens."""
    yield from choice_bias(name, tensor, config)
    if name == "model.layers.0.input_layernorm.weight":
        for leaf in ("attn_norm", "nextn.enorm"):
            yield f"blk.{config.num_hidden_layers}.{leaf}.weight", tensor


CASES = (
    Case(
        "jetmoe",
        {"num_attention_heads": None, "kv_channels": 12, "num_local_experts": 5},
        axes=(
            TIED,
            ({}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}),
            ({}, {"num_key_value_heads": 1}, {"activation_function": "gelu"}),
            ropes(12),
        ),
    ),
    Case(
        "aria_text",
        {"intermediate_size": 24, "moe_num_experts": 5},
        axes=(
            TIED,
            ({}, {"mlp_bias": True}, {"attention_bias": True}),
            ({}, {"hidden_act": "gelu"}),
            ({}, {"moe_topk": 3}, {"moe_num_shared_experts": 1}),
            (*ropes(8), {"head_dim": 12}),
        ),
    ),
    Case(
        "afmoe",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "global_attn_every_n_layers": 2,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_key_value_heads": None}),
            ({}, {"layer_types": _KINDS}, {"global_attn_every_n_layers": 3}),
            ({}, {"mup_enabled": True}, {"hidden_act": "gelu"}),
            ({}, {"num_dense_layers": 0}, {"num_dense_layers": 2}),
            ({}, {"route_scale": 1.7, "num_shared_experts": 1}),
            ropes(8),
        ),
        gguf=GgufCase(
            "afmoe",
            _afmoe,
            _biased,
            {"mup_enabled": True, "num_hidden_layers": 4, "global_attn_every_n_layers": 4},
        ),
    ),
    Case(
        "ernie4_5_moe",
        _ERNIE,
        axes=(
            TIED,
            ({}, {"use_bias": True}),
            ({}, {"moe_num_shared_experts": 0}, {"hidden_act": "gelu"}),
            ({}, {"moe_layer_start_index": 0}, {"moe_layer_end_index": 1}),
            ({}, {"moe_layer_interval": 2, "moe_layer_start_index": 0}),
            ropes(8),
        ),
        gguf=GgufCase("ernie4_5-moe", _ernie, choice_bias),
    ),
    Case(
        "exaone_moe",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
        },
        axes=(
            TIED,
            ({}, {"layer_types": _KINDS}, {"sliding_window_pattern": 2}),
            ({}, {"n_group": 4, "topk_group": 2}, {"num_shared_experts": 2}),
            ({}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.3}),
            (
                {},
                {"first_k_dense_replace": 0},
                {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            ),
            ropes(8),
        ),
        gguf=GgufCase("exaone-moe", _exaone, choice_bias),
        more_gguf=(GgufCase("exaone-moe", _with_drafts, _drafting),),
    ),
)
