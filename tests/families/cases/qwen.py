from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case

_WINDOWS = (
    {},
    {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
)


def _of_images(config: Any) -> dict[str, Any]:
    """What the text models of Qwen2-VL and Qwen3-VL add: how three coordinates share a head."""
    return {"rope.dimension_sections": [2, 1, 1, 0]}


CASES = (
    Case(
        "qwen2",
        axes=(TIED, _WINDOWS),
        gguf=GgufCase("qwen2"),
        more_gguf=(GgufCase("qwen2vl", _of_images),),
    ),
    Case(
        "qwen3",
        {"head_dim": 12},
        axes=(TIED, _WINDOWS, ({}, {"attention_bias": True})),
        gguf=GgufCase("qwen3"),
        more_gguf=(
            GgufCase("qwen3vl", lambda config: {**_of_images(config), "n_deepstack_layers": 3}),
        ),
    ),
)
