from collections.abc import Mapping
from typing import Any

import torch
from harness import TIED, Case, ropes


def _first_state(model: Any, options: Mapping[str, Any]) -> None:
    """What the fast state is at first: a parameter that nothing trains, of zeros."""
    torch.nn.init.normal_(model.model.z_L_init)


CASES = (
    Case(
        "hrm_text",
        {
            "num_key_value_heads": None,
            "head_dim": 12,
            "H_cycles": 2,
            "L_cycles": 2,
            "L_bp_cycles": [2, 2],
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            ({}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3, "H_cycles": 1}),
            ({}, {"L_cycles": 1}, {"embedding_scale": 3.0}, {"initializer_range": 0.1}),
            ropes(12),
        ),
        alter=_first_state,
    ),
)
