from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case, ropes

_WINDOW, _FULL = "sliding_attention", "full_attention"
_DENSE = {"mlp_layer_types": ["dense", "dense", "sparse"]}


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
    Case(
        "cohere2_moe",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "logit_scale": 0.6,
            "intermediate_size": 24,
            "num_experts": 5,
            "num_hidden_layers": 3,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"rms_norm_eps": 1e-6}, {"hidden_act": "gelu"}),
            (
                {},
                {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2},
                {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40},
                {**_DENSE, "layer_types": [_FULL, _WINDOW, _FULL]},
                {
                    **_DENSE,
                    "layer_types": [_FULL, _WINDOW, _FULL],
                    "prefix_dense_sliding_window_pattern": 3,
                },
            ),
            ({}, {"expert_selection_fn": "sigmoid"}),
            ({}, {"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
            (
                {},
                {"num_shared_experts": 2},
                {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
            ),
            ropes(8),
        ),
    ),
)
