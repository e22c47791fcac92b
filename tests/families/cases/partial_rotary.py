from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gguf_files import GgufCase, fused_qkv, unchanged
from harness import TIED, Case, rope, ropes
from torch import Tensor

_QK_NORMS = ({"qk_layernorm": True}, {"qk_layernorm": False})
_GROUPS = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1})


def _rotated(config: Any) -> Mapping[str, Any]:
    size = config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(config.rope_parameters["partial_rotary_factor"] * size)}


def _stablelm(config: Any) -> Mapping[str, Any]:
    return {**_rotated(config), "use_parallel_residual": config.use_parallel_residual}


def _orion(config: Any) -> Mapping[str, Any]:
    return {"rope.freq_base": None}


def _starcoder2(config: Any) -> Mapping[str, Any]:
    return {"attention.layer_norm_epsilon": config.norm_epsilon}


class _Stacked:
    """A norm for every head as one tensor for all of them."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
        stem, found, _ = name.partition(".norms.")
        if not found:
            yield name, tensor
            return
        self.waiting.setdefault(stem, []).append(tensor)
        heads = "num_attention_heads" if "q_layernorm" in stem else "num_key_value_heads"
        if len(self.waiting[stem]) == getattr(config, heads):
            yield stem + ".weight", torch.stack(self.waiting.pop(stem))


CASES = (
    Case(
        "phi",
        axes=(
            TIED,
            _GROUPS,
            _QK_NORMS,
            ({}, {"hidden_act": "silu"}),
            (*ropes(4), rope("default", partial_rotary_factor=1.0)),
        ),
        gguf=GgufCase("phi2", _rotated),
    ),
    Case(
        "persimmon",
        {"num_key_value_heads": None},
        axes=(TIED, _QK_NORMS, (*ropes(4), rope("default", partial_rotary_factor=0.75))),
    ),
    Case(
        "stablelm",
        axes=(
            TIED,
            _GROUPS,
            _QK_NORMS,
            ({}, {"use_parallel_residual": True}),
            ({}, {"use_qkv_bias": True}, {"hidden_act": "gelu"}),
            (*ropes(4, partial_rotary_factor=0.5), rope("default", partial_rotary_factor=0.75)),
        ),
        gguf=GgufCase(
            "stablelm",
            _stablelm,
            _Stacked(),
            {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
        ),
        more_gguf=(GgufCase("orion", _orion, options={"partial_rotary_factor": 1.0}),),
    ),
    Case(
        "starcoder2",
        axes=(
            TIED,
            _GROUPS,
            ({}, {"use_bias": False}, {"hidden_act": "silu"}),
            ({}, {"sliding_window": 7}),
            ropes(8),
        ),
        gguf=GgufCase("starcoder2", _starcoder2),
        more_gguf=(
            GgufCase(
                "codeshell", _starcoder2, fused_qkv(unchanged), {"tie_word_embeddings": False}
            ),
        ),
    ),
)
