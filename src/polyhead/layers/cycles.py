"""Two stacks of layers that take turns over two states.

    l = norm(L(l + h))      several times, then      h = norm(H(h + l))       and so on

with h at first the embedding, l a stored vector, and h at last what is given. Wang et al. 2025,
"Hierarchical Reasoning Model" (arXiv 2506.21734); HRM-Text (Sapient 2026). A layer that computes in
several cycles has as many places in a model, with one set of weights (``weights_of``) and keys of
each turn.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import CyclesConfig
from polyhead.layers.norms import build_norm
from polyhead.layers.streams import StreamEnds, StreamMixer, register_streams


class Cycles(StreamMixer):
    """Gives a layer its state ``[B, T, E]`` of ``[B, T, 2, E]``, and puts it back; see the module.

    Args:
        embed_dim: Embedding size E of each state.
        config: Which state, and where in its turn the layer is.
    """

    def __init__(self, embed_dim: int, config: CyclesConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = build_norm(embed_dim, config.norm)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        own = self.config.computes
        x = streams.sum(dim=2) if self.config.starts else streams[:, :, own]
        return x, streams[:, :, 1 - own]

    def write(self, kept: Tensor, made: Tensor) -> Tensor:
        if self.config.ends:
            made = self.norm(made)
        both = (made, kept) if self.config.computes == 0 else (kept, made)
        return torch.stack(both, dim=2)


class CyclesEnds(StreamEnds):
    """The embedding and the first fast state to both; of both the slow one.

    Args:
        embed_dim: Embedding size E of each state.
        config: Not read.

    Attributes:
        fast: ``[E]``, which is not trained.
    """

    fast: Tensor

    def __init__(self, embed_dim: int, config: CyclesConfig) -> None:
        super().__init__()
        self.register_buffer("fast", torch.zeros(embed_dim))

    def enter(self, x: Tensor) -> Tensor:
        return torch.stack((x, self.fast.to(x.dtype).expand_as(x)), dim=-2)

    def leave(self, streams: Tensor) -> Tensor:
        return streams[..., 0, :]


register_streams(CyclesConfig, Cycles, CyclesEnds)
