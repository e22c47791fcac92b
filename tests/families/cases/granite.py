from typing import Any

from gguf_files import GgufCase, paired
from harness import TIED, Case, ropes


def _settings(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
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
