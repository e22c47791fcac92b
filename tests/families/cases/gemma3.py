from collections.abc import Iterable, Mapping
from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case
from torch import Tensor

_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_SCALED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
}


def _settings(config: Any) -> Mapping[str, Any]:
    return {
        "rope.freq_base": 1e6,
        "attention.sliding_window_pattern": 3,
    }


def _converted(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


CASES = (
    Case(
        "gemma3_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": _TYPES,
        },
        axes=(
            TIED,
            ({}, {"num_key_value_heads": 1}, {"attention_bias": True}),
            ({}, {"final_logit_softcapping": 5.0}, {"query_pre_attn_scalar": 12}),
            ({}, _SCALED),
        ),
        gguf=GgufCase("gemma3", _settings, _converted, {"query_pre_attn_scalar": 12}),
    ),
)
