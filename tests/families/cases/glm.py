from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case, rope

_AXES = (
    TIED,
    ({}, {"attention_bias": False}, {"num_key_value_heads": 4}),
    ({}, rope("default", partial_rotary_factor=1.0)),
)


def _half(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": 8}


CASES = (
    Case("glm", {"head_dim": 16}, axes=_AXES),
    Case("glm4", {"head_dim": 16}, axes=_AXES, gguf=GgufCase("glm4", _half)),
)
