"""Rotary settings written for config.json: the inverse of ``rope_in``."""

from __future__ import annotations

from typing import Any

from polyhead.checkpoints.rope_in import ROPE_FIELDS
from polyhead.config import RopeConfig


def write_rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """In the older spelling, which every version of transformers reads."""
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dim is not None:
        values["partial_rotary_factor"] = rope.dim / head_dim
    if rope.type != "default":
        values["rope_scaling"] = {"rope_type": rope.type} | write_scaling(rope)
    return values


def write_scaling(rope: RopeConfig) -> dict[str, Any]:
    """The numbers of the scaling type."""
    fields = {theirs: getattr(rope, ours) for theirs, ours in ROPE_FIELDS.items()}
    if rope.type == "dynamic":  # starts from max_position_embeddings
        del fields["original_max_position_embeddings"]
    if rope.truncate:
        del fields["truncate"]
    return {key: value for key, value in fields.items() if value is not None}


def stated_length(rope: RopeConfig, max_positions: int) -> int:
    """max_position_embeddings: the inverse of ``rope_in.reach``."""
    if rope.type in ("linear", "dynamic"):
        return round(max_positions / (rope.factor or 1.0))
    return max_positions
