"""A learned augmented residual layer (LAuReL): attention's input beside what attention gives.

    x = (x + f(n) + n + norm(W W' n)) / √2         n: the normed input, W' to r features

Menghani et al. 2024, arXiv 2411.07501, the low-rank form; Gemma 3n.

Shape letters: B batch, T tokens, r rank, E embed size.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from polyhead.config import NormConfig
from polyhead.layers.fixed import Fixed
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm


class Laurel(Fixed):
    """Joins attention's input to the residual stream; see the module.

    Args:
        embed_dim: Embedding size E of the residual stream.
        rank: r.
        norm: Over the projection.
    """

    def __init__(self, embed_dim: int, rank: int, norm: NormConfig) -> None:
        super().__init__()
        self.in_proj = nn.Linear(embed_dim, rank, bias=False)
        self.out_proj = nn.Linear(rank, embed_dim, bias=False)
        self.norm = build_norm(embed_dim, norm)

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """``x``, attention's output in it, and attention's input, ``[B, T, E]`` each."""
        low: Tensor = self.norm(linear(linear(normed, self.in_proj), self.out_proj))
        return (x + (normed + low)) / math.sqrt(2.0)
