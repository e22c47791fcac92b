from typing import Any

from gguf_files import GgufCase, plus_one
from harness import TIED, Case, ropes

_KINDS = ["sliding_attention", "full_attention"]


def _capped(config: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


_SECOND = {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 24}
_AXES_OF_SECOND = (
    TIED,
    ({}, {"num_key_value_heads": 4}, {"attention_bias": True}),
    ({}, {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0}),
    ({}, {"layer_types": _KINDS[::-1]}, {"query_pre_attn_scalar": 12}),
)

CASES = (
    Case(
        "gemma",
        {"head_dim": 12},
        axes=(
            TIED,
            ({}, {"num_key_value_heads": 1}, {"attention_bias": True}),
            ({}, {"hidden_act": "gelu"}),
            ropes(12),
        ),
        gguf=GgufCase("gemma", change=plus_one),
    ),
    Case(
        "gemma2",
        _SECOND,
        axes=_AXES_OF_SECOND,
        gguf=GgufCase("gemma2", _capped, plus_one, {"query_pre_attn_scalar": 12}),
    ),
    Case("vaultgemma", _SECOND, axes=(*_AXES_OF_SECOND, ropes(12))),
)
