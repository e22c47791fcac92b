from collections.abc import Mapping
from typing import Any

import torch
from harness import TIED, Case


def _alter(model: Any, options: Mapping[str, Any]) -> None:
    """Factors of the stream are near 1, and every expert is chosen, the one that gives nothing too.

    The bias of the choice is no parameter, and its last number is -1 in every model that
    transformers reads from a file, whatever the file says.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("hidden_states_scale", "residual_scale", "temp")):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        elif name.endswith("balancing_biases"):
            torch.nn.init.normal_(tensor, mean=-1.0, std=0.05)
            tensor[-1] = -1.0
        elif ".router_mlp." in name and tensor.ndim == 2:
            torch.nn.init.normal_(tensor, std=0.6)


def _rope(**kinds: Mapping[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": 500.0}
    return {
        "rope_parameters": {
            "hybrid": {**plain, **kinds.get("hybrid", {})},
            "hybrid_sliding": {**plain, **kinds.get("hybrid_sliding", {})},
        }
    }


_WINDOW = {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 7}

CASES = (
    Case(
        "zaya",
        {
            "intermediate_size": None,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "moe_intermediate_size": 20,
            "num_experts": 4,
            "router_hidden_size": 12,
        },
        axes=(
            TIED,
            ({}, {"cca_time0": 3}, {"cca_time1": 4}, {"cca_time0": 1}, {"cca_time1": 1}),
            ({}, {"attention_bias": True}, {"lm_head_bias": True}, {"rms_norm_eps": 0.1}),
            ({}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"hidden_act": "gelu"}),
            (
                {},
                _WINDOW,
                {"layer_types": ["hybrid_sliding"] * 3, "sliding_window": 4},
            ),
            (
                {},
                _rope(),
                _rope(hybrid={"partial_rotary_factor": 0.25}),
                _rope(
                    hybrid={"rope_type": "linear", "factor": 4.0},
                    hybrid_sliding={"rope_theta": 50.0},
                ),
                _rope(
                    hybrid={
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "original_max_position_embeddings": 16,
                    }
                ),
            ),
        ),
        alter=_alter,
    ),
)
