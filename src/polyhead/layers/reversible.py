"""Two residual streams that parts of layers write in turn, so that inputs follow from outputs.

    y₁ = x₁ + attention(x₂)        y₂ = x₂ + network(y₁)

Gomez et al. 2017, "The Reversible Residual Network", arXiv 1707.04585; Reformer (Kitaev et al.
2020). The stream that was written last is the second one: a part reads that, adds to the first, and
they change places.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import ReversibleConfig
from polyhead.layers.streams import StreamEnds, StreamMixer, register_streams


class Reversible(StreamMixer):
    """Reads the second of two streams and adds to the first; see the module.

    Args:
        embed_dim: Not read.
        config: Not read.
    """

    def __init__(self, embed_dim: int, config: ReversibleConfig) -> None:
        super().__init__()

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        return streams[:, :, 1], streams

    def write(self, kept: Tensor, made: Tensor) -> Tensor:
        return torch.stack((kept[:, :, 1], kept[:, :, 0] + made), dim=2)


class ReversibleEnds(StreamEnds):
    """The embedding to both streams; both side by side.

    Args:
        embed_dim: Not read.
        config: Not read.
    """

    def __init__(self, embed_dim: int, config: ReversibleConfig) -> None:
        super().__init__()

    def enter(self, x: Tensor) -> Tensor:
        return torch.stack((x, x), dim=-2)

    def leave(self, streams: Tensor) -> Tensor:
        return streams.flatten(-2)


register_streams(ReversibleConfig, Reversible, ReversibleEnds)
