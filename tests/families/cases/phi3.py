from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case, ropes


def _settings(config: Any) -> dict[str, Any]:
    return {
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.sliding_window": config.sliding_window or 0,
        "rope.dimension_count": 8,
    }


CASES = (
    Case(
        "phi3",
        {"original_max_position_embeddings": 16},
        axes=(
            TIED,
            ({}, {"sliding_window": 7}, {"num_key_value_heads": 4}),
            # transformers takes no other scaling for this family.
            tuple(each for each in ropes(8) if not each or "longrope" in str(each)),
        ),
        gguf=GgufCase("phi3", _settings),
    ),
)
