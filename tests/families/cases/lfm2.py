from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case, rope
from torch import Tensor

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
_CONV = ({}, {"conv_bias": True}, {"conv_L_cache": 2}, {"conv_L_cache": 5})
_ROPE = ({}, rope("linear", factor=4.0))


def _heads(config: Any) -> dict[str, Any]:
    heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [
            heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _dense(config: Any) -> dict[str, Any]:
    size, multiple = int(2 * config.intermediate_size / 3), config.block_multiple_of
    return {**_heads(config), "feed_forward_length": -(-size // multiple) * multiple}


def _sparse(config: Any) -> dict[str, Any]:
    return {
        **_heads(config),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _converted(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    if name.endswith("expert_bias"):
        name += ".bias"
    if ".experts." in name:
        name = name.removeprefix("model.")
    yield name, tensor.squeeze(1) if "conv.conv" in name else tensor


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
        gguf=GgufCase("lfm2", _dense, _converted, written=False),
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
        gguf=GgufCase("lfm2moe", _sparse, _converted, written=False),
    ),
)
