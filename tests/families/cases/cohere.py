from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case, ropes


def _scaled(config: Any) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}


CASES = (
    Case(
        "cohere",
        {"logit_scale": 0.6},
        axes=(TIED, ({}, {"use_qk_norm": True}, {"attention_bias": True}), ropes(8)),
        gguf=GgufCase("command-r", _scaled, options={"use_qk_norm": True}),
    ),
    Case(
        "cohere2",
        {"head_dim": 12, "sliding_window": 7, "logit_scale": 0.6, "num_hidden_layers": 4},
        axes=(
            TIED,
            ({}, {"attention_bias": True}),
            ({}, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ),
        gguf=GgufCase("cohere2", _scaled),
    ),
)
