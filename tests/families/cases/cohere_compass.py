from typing import Any

from harness import TIED, Case


def _by_kind(sliding: Any, full: Any) -> dict[str, Any]:
    return {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}


_STRETCH: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 16}

CASES = (
    Case(
        "cohere_compass_text",
        {
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_by_kind({"rope_type": "default", "rope_theta": 500.0}, None),
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"logit_scale": 0.6}, {"num_key_value_heads": 4}),
            (
                {},
                {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            ),
            (
                {},
                _by_kind(
                    {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
                    {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
                ),
                _by_kind(None, {"rope_type": "yarn", "rope_theta": 100.0, **_STRETCH}),
            ),
        ),
    ),
)
