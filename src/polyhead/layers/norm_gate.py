"""A gate of what a norm gives, made from that itself by a network of few features.

    y · σ(W silu(W' y))         y what the norm gives, W' to r features

A.X K2 (SK Telecom 2026).

Shape letters: B batch, T tokens, r rank, E embed size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import NormGateConfig
from polyhead.layers.fixed import Fixed
from polyhead.layers.linear import linear


class NormGate(Fixed):
    """Gates what a norm gives; see the module.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Its rank r.
    """

    def __init__(self, embed_dim: int, config: NormGateConfig) -> None:
        super().__init__()
        self.down_proj = nn.Linear(embed_dim, config.rank, bias=False)
        self.up_proj = nn.Linear(config.rank, embed_dim, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        """``[B, T, E]`` to the same."""
        gate = linear(F.silu(linear(y, self.down_proj)), self.up_proj)
        gate = torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        return (y * gate).to(y.dtype)
