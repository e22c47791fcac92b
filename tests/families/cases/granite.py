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


CASES = (
    Case(
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        axes=(TIED, ({}, {"attention_bias": True}, {"mlp_bias": True}), ropes(8)),
        gguf=GgufCase("granite", _settings, paired),
    ),
)
