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

CASES = (
    Case("qwen2", axes=(TIED, _WINDOWS), gguf=GgufCase("qwen2")),
    Case(
        "qwen3",
        {"head_dim": 12},
        axes=(TIED, _WINDOWS, ({}, {"attention_bias": True})),
        gguf=GgufCase("qwen3"),
    ),
)
