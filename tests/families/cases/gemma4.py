from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gguf_files import GgufCase
from harness import TIED, Case
from torch import Tensor

_KINDS = ["sliding_attention", "full_attention"]
_ONE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
_SCALED = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 900.0,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
}

_CAPPED = {"final_logit_softcapping": 5.0}
_SHARED = {"num_kv_shared_layers": 2}
# The last of several layers of a kind hands on its keys, not the first.
_LAST_OF_TWO = {
    "layer_types": [_KINDS[1], _KINDS[0], _KINDS[1], _KINDS[1]],
    "num_kv_shared_layers": 1,
}
# A list that does not end with a full layer: transformers makes it one.
_ENDS_FULL = {"layer_types": [_KINDS[1], _KINDS[0], _KINDS[0], _KINDS[0]]}

_SIZES = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 7,
    "layer_types": 2 * _KINDS,
}


def layers(config: Any) -> dict[str, Any]:
    """What the converter says of Gemma 3n's and 4's layers."""
    ropes = config.rope_parameters
    return {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config.layer_types
        ],
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.final_logit_softcapping or None,
    }


def _of_full(config: Any, key: str) -> int:
    """A size of layers without a window, of which the last is one."""
    return int(getattr(config.per_layer_config[config.num_hidden_layers - 1], key))


def _wide(config: Any) -> int:
    return _of_full(config, "head_dim")


def _settings(config: Any) -> Mapping[str, Any]:
    wide, narrow = _wide(config), config.head_dim
    sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    count, hidden = config.num_hidden_layers, config.intermediate_size
    first = count - config.num_kv_shared_layers
    of_full, of_windows = _of_full(config, "num_key_value_heads"), config.num_key_value_heads
    kinds = config.layer_types
    more = {}
    if config.use_double_wide_mlp:
        more["feed_forward_length"] = [hidden if i < first else 2 * hidden for i in range(count)]
    if of_full != of_windows:
        more["attention.head_count_kv"] = [
            of_windows if kind == "sliding_attention" else of_full for kind in kinds
        ]
    return {
        **layers(config),
        **dict.fromkeys(sizes, wide),
        **{f"{size}_swa": narrow for size in sizes},
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        **more,
    }


def _changed(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    layer = name.split(".")[2]
    if name == "model.norm.weight":  # the divisors that let pairs of full layers stand still
        part = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        turned = int(_wide(config) * part / 2)
        still = _wide(config) // 2 - turned
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * still)
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield name + ".weight", tensor
    else:
        yield name, tensor


CASES = (
    Case(
        "gemma4_unified_text",
        _SIZES,
        axes=(
            TIED,
            ({}, {**_SHARED, "use_double_wide_mlp": True}, _ONE, _LAST_OF_TWO, _ENDS_FULL),
            ({}, {"attention_bias": True}, {"final_logit_softcapping": 5.0}),
            ({}, _SCALED),
        ),
        spread=0.1,
        # Of the float32 logits transformers' are up to 2.2e-5 from our model in float64, ours up to
        # 4.5e-5, and the two up to 5.5e-5 apart.
        error=1e-4,
    ),
    Case(
        "gemma4_text",
        {**_SIZES, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 61},
        axes=(
            TIED,
            (
                {},
                _SHARED,
                {**_SHARED, **_ONE},
                _ONE,
                _LAST_OF_TWO,
                # With shared layers too, transformers' own code fails at this.
                {"hidden_size_per_layer_input": 0},
            ),
            ({}, {"attention_bias": True}, _EXPERTS, {**_EXPERTS, "top_k_experts": 1}),
            ({}, {"use_double_wide_mlp": True}, {"final_logit_softcapping": 5.0}),
            ({}, _SCALED),
        ),
        spread=0.1,
        # Over 60 draws transformers' float32 logits are up to 3.4e-5 from our model in float64,
        # ours up to 5.0e-5, and the two up to 5.9e-5 apart.
        error=1e-4,
        # With a softcap, half a unit in float32's last place of each weight moves the gradients of
        # our model in float64 by up to 2.6e-4.
        gradient_error=3e-4,
        gguf=GgufCase("gemma4", _settings, _changed),
        more_gguf=(
            GgufCase("gemma4", _settings, _changed, {**_SHARED, **_ONE, **_CAPPED}),
            GgufCase("gemma4", _settings, _changed, {**_SHARED, "use_double_wide_mlp": True}),
            GgufCase("gemma4", _settings, _changed, _EXPERTS),
        ),
    ),
)
