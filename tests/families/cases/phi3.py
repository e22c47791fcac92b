import math
from collections.abc import Iterable
from typing import Any

import torch
from gguf_files import GgufCase
from harness import TIED, Case, ropes
from torch import Tensor


def _settings(config: Any) -> dict[str, Any]:
    return {
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.sliding_window": config.sliding_window or 0,
        "rope.dimension_count": 8,
    }


_LONG = ropes(8)[-1]


def with_factors(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    yield name, tensor
    if name == "model.norm.weight":
        for kind in ("short", "long"):
            factors = torch.tensor(config.rope_parameters[f"{kind}_factor"])
            yield f"rope_factors_{kind}.weight", factors


def _long(config: Any) -> dict[str, Any]:
    """llama.cpp's converter works the factor of cos and sin out."""
    trained = config.rope_parameters["original_max_position_embeddings"]
    factor = math.sqrt(1 + math.log(64 / trained) / math.log(trained))
    return {**_settings(config), "rope.scaling.attn_factor": factor}


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
        more_gguf=(
            GgufCase("phi3", _long, with_factors, _LONG),
            GgufCase(
                "phi3",
                lambda config: {**_long(config), "rope.scaling.type": "longrope"},
                with_factors,
                _LONG,
            ),
        ),
    ),
)
