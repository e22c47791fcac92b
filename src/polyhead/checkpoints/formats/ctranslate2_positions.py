"""Which positions a table in a file holds: learned ones, or a family's sinusoids."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import EmbeddingConfig, SinusoidConfig
from polyhead.layers.positions import SinusoidalPositions

_SINUSOIDS = tuple(
    EmbeddingConfig("sinusoidal", position_offset=offset, sinusoid=sinusoid)
    for sinusoid, offset in (
        (SinusoidConfig("halves", spread=True), 1),  # OpenNMT
        (SinusoidConfig("halves", spread=True), 2),  # M2M-100
        (SinusoidConfig("halves"), 0),  # Marian, Pegasus
        (SinusoidConfig(), 0),  # the 2017 paper
    )
)
"""Positions that families compute; the first where a file has no table."""


def positions_of(table: Tensor | None) -> EmbeddingConfig:
    """The embedding of a table ``[positions, E]``; sinusoids may be rounded to the table's type.

    Where they are sinusoids, families can say it, and the model can be saved as one of theirs.
    """
    if table is None:
        return _SINUSOIDS[0]
    rows, size = table.shape
    room = max(2e-4, torch.finfo(table.dtype).eps)
    for found in _SINUSOIDS if size % 2 == 0 else ():
        computed = SinusoidalPositions(size, found.sinusoid)(found.position_offset, rows)
        if torch.allclose(table.float(), computed, atol=room, rtol=0):
            return found
    return EmbeddingConfig("learned")
