"""Mixtures of experts in models whose layers have windows or see everything."""

from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase, choice_bias, fused_qkv
from harness import TIED, Case, ropes
from torch import Tensor

_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_DENSE = (
    {},
    {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    {"mlp_layer_types": ["sparse"] * 3},
    {"mlp_layer_types": ["dense"] * 3},
)


def _of_kinds(full: dict[str, Any], part: float | None = None) -> dict[str, Any]:
    """The rotary settings of layers that see everything, beside plain ones of the others."""
    near = {"rope_type": "default", "rope_theta": 300.0}
    for each in (full, near) if part else ():
        each["partial_rotary_factor"] = part
    return {"rope_parameters": {"full_attention": full, "sliding_attention": near}}


def _ropes(head_dim: int, part: float | None = None) -> tuple[dict[str, Any], ...]:
    kinds = [option["rope_parameters"] for option in ropes(head_dim) if option]
    kinds = [each for each in kinds if each["rope_type"] != "dynamic"]
    return ({}, *(_of_kinds({**each}, part) for each in kinds))


_KINDS_AND_PARTS = {"layer_types": _KINDS, "routed_scaling_factor": 1.0}
_NO_SCALE = {"attention_value_scale": None}


def _mimo(config: Any) -> dict[str, Any]:
    near = [kind == "sliding_attention" for kind in config.layer_types]
    heads, ropes = config.num_key_value_heads, config.rope_parameters
    part = ropes["full_attention"]["partial_rotary_factor"]
    return {
        "attention.head_count_kv": [2 * heads if each else heads for each in near],
        "attention.sliding_window_pattern": [int(each) for each in near],
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "rope.dimension_count": int(config.head_dim * part),
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def _first_mimo(config: Any) -> dict[str, Any]:
    """Before the factor of values was written."""
    return {**_mimo(config), "attention.value_scale": None}


def _drafting_mimo(config: Any) -> dict[str, Any]:
    settings = _mimo(config)
    for key in ("attention.head_count_kv", "attention.sliding_window_pattern"):
        settings[key] += [2 * config.num_key_value_heads if "kv" in key else 1]
    layers = config.num_hidden_layers + 1
    return {**settings, "block_count": layers, "nextn_predict_layers": 1}


def _biases(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    name = name.replace("attention_sink_bias", "attention_sink_bias.weight")
    yield from choice_bias(name, tensor, config)


def _with_drafts(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    if name == "model.norm.weight":
        yield f"blk.{config.num_hidden_layers}.attn_norm.weight", tensor
        yield f"blk.{config.num_hidden_layers}.nextn.enorm.weight", tensor
    yield from _biases(name, tensor, config)


CASES = (
    Case(
        "mimo_v2_flash",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "v_head_dim": 10,
            "sliding_window": 7,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_key_value_heads": 1}, {"v_head_dim": 12}),
            ({}, {"layer_types": _KINDS}, {"layer_types": ["full_attention"] * 3}),
            ({}, {"attention_value_scale": None}, {"attention_value_scale": 0.5}),
            ({}, {"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False}),
            ({}, {"routed_scaling_factor": 1.7}, {"sliding_window_size": 5}),
            _DENSE,
            _ropes(12),
        ),
        gguf=GgufCase("mimo2", _mimo, _biases, _KINDS_AND_PARTS),
        more_gguf=(
            GgufCase("mimo2", _first_mimo, _biases, _KINDS_AND_PARTS),
            GgufCase("mimo2", _drafting_mimo, _with_drafts, _KINDS_AND_PARTS | _NO_SCALE),
            GgufCase("mimo2", _mimo, fused_qkv(_biases), _KINDS_AND_PARTS),
        ),
    ),
    Case(
        "laguna",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 7,
            "layer_types": _KINDS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"gating": "per-element"}),
            ({}, {"num_attention_heads_per_layer": [2, 4, 6]}),
            ({}, {"layer_types": None}, {"layer_types": ["sliding_attention"] * 3}),
            ({}, {"moe_routed_scaling_factor": 1.7}),
            _DENSE,
            (*_ropes(12), *_ropes(8, 8 / 12)[1:]),
        ),
    ),
    Case(
        "step3p5",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 7,
            "layer_types": _KINDS,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "moe_intermediate_size": 24,
            "share_expert_dim": 28,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limits": [0.2, None, 0.0],
            "swiglu_limits_shared": [None, 0.1, 0.2],
        },
        axes=(
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            ({}, {"layer_types": None}, {"layer_types": ["sliding_attention"] * 3}),
            ({}, {"moe_router_scaling_factor": 1.7}, {"query_pre_attn_scalar": 20}),
            ({}, {"swiglu_limits": None}, {"swiglu_limits_shared": None}),
            _DENSE,
            # transformers cannot draw longrope's frequencies where numbers of heads differ.
            (*_ropes(12), *_ropes(8, 8 / 12)[1:], {"num_sliding_attention_heads": 6}),
        ),
        auto="Step3p7TextModel",
    ),
)
