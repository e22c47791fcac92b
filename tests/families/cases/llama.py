from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase, interleaved
from harness import TIED, Case, ropes
from torch import Tensor


def _converted(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if part in name:
            tensor = interleaved(tensor, heads)
    yield name, tensor


CASES = (
    Case(
        "llama",
        axes=(
            TIED,
            ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 12}),
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu_new"}),
            ropes(8),
        ),
        gguf=GgufCase("llama", change=_converted, options={"attention_bias": True}),
    ),
    Case(
        "mistral",
        axes=(
            TIED,
            ({"sliding_window": 7}, {"sliding_window": None}, {"head_dim": 12}),
        ),
    ),
)
