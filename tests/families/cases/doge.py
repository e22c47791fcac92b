from collections.abc import Mapping
from typing import Any

import torch
from harness import TIED, Case, ropes


def _apart(model: Any, options: Mapping[str, Any]) -> None:
    """Numbers that choose keys differ by more than float32 rounds."""
    for name, tensor in model.named_parameters():
        if name.endswith("dt_proj.weight"):
            tensor.data *= 0.5
        elif name.endswith("self_attn.A"):
            tensor.data = 0.8 * tensor.sign()
        elif name.endswith("_residual"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)


CASES = (
    Case(
        "doge",
        # Equal tokens have equal numbers in the first layer, and which of them transformers keeps
        # is not defined: in a text of this vocabulary there are none.
        {"keep_window_size": 7, "vocab_size": 1009},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 12}),
            ({}, {"keep_window_size": 2}, {"keep_window_size": 30}, {"sliding_window": 9}),
            ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"rms_norm_eps": 0.1}),
            ropes(8)[:3],
        ),
        alter=_apart,
        gradient_error=1e-2,  # one number for all heads, of terms that nearly cancel
        float64_gradient_error=1e-4,
    ),
)
