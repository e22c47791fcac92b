from collections.abc import Iterable
from typing import Any

import torch
from gguf_files import GgufCase, paired
from harness import TIED, Case, rope, ropes
from torch import Tensor


def _settings(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _scales(config: Any) -> dict[str, Any]:
    """MiniCPM's files have all but attention's."""
    return {key: value for key, value in _settings(config).items() if key != "attention.scale"}


def _long(config: Any) -> dict[str, Any]:
    scaling = {"type": "longrope", "original_context_length": 256}
    return {**_scales(config), **{f"rope.scaling.{key}": each for key, each in scaling.items()}}


def _divided(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """MiniCPM 4 has its divisors of rotary frequencies in tensors."""
    yield from paired(name, tensor, config)
    if name == "model.norm.weight":
        for length, divisors in _DIVISORS.items():
            yield f"rope_factors_{length}.weight", torch.tensor(divisors)


_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}
_DIVISORS = {"short": [1.0, 1.2, 1.5, 1.7, 2.0, 2.5], "long": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0]}
_LONG = {
    "attention_multiplier": 12**-0.5,
    "head_dim": 12,
    "max_position_embeddings": 256,
    **rope(
        "longrope",
        short_factor=_DIVISORS["short"],
        long_factor=_DIVISORS["long"],
        original_max_position_embeddings=256,
        factor=1.0,
    ),
}
_WINDOWED = {**_MULTIPLIERS, "sliding_window": 7, "num_hidden_layers": 3}
_LAYERS = (
    TIED,
    ({}, {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ({}, {"layer_rope_theta": [0, 100.0, 50]}, {"layer_rope_theta": [30.0, 0, 0]}),
    ropes(8),
)

CASES = (
    Case(
        "granite",
        _MULTIPLIERS,
        axes=(TIED, ({}, {"attention_bias": True}, {"mlp_bias": True}), ropes(8)),
        gguf=GgufCase("granite", _settings, paired),
        more_gguf=(
            GgufCase("minicpm", _scales, paired, {"attention_multiplier": 8**-0.5}),
            GgufCase("minicpm", _long, _divided, _LONG),
        ),
    ),
    Case(
        "granite_swa",
        _WINDOWED,
        axes=(*_LAYERS, ({}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 8})),
    ),
    Case(
        "granitemoe_swa",
        {**_WINDOWED, "num_local_experts": 5, "shared_intermediate_size": 24},
        axes=(
            *_LAYERS,
            ({}, {"attention_bias": True}, {"num_experts_per_tok": 3}),
            ({}, {"shared_intermediate_size": 0}),
        ),
    ),
    Case(
        "hyperclovax",
        {**_MULTIPLIERS, "head_dim": 12},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"use_post_norm": False}),
            ({}, {"attention_multiplier": None}, {"num_key_value_heads": 4}),
            ropes(12),
        ),
    ),
)
