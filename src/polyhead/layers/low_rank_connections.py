"""Residual streams that are read feature by feature, by weights of low rank.

    n_i = norm(s_i)                              with a weight for each feature of each stream
    a   = σ(silu([n_1 … n_n] W↓ / n) W↑)         c = 2 σ([n_1 … n_n] Wc / n)
    x   = Σ_i a_i ⊙ n_i / n                      s_i = s_i + c_i f(x)

with f a part of a layer, which has no norm before it. At first all streams are the embedding; at
last x of them is given. Qwen4-Exp (2026), by transformers' code; the idea is that of
hyper-connections (Zhu et al. 2024, arXiv 2409.19606).

Shape letters: B batch, T tokens, n streams, E embed size, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import LowRankConnectionsConfig
from polyhead.layers.fixed import Fixed
from polyhead.layers.linear import linear
from polyhead.layers.norms import HeadNorm
from polyhead.layers.streams import StreamEnds, StreamMixer, register_streams


class LowRankSum(Fixed):
    """Reads one vector of the streams; see the module.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams, rank, norm.

    Attributes:
        norm: Weights ``[n, E]``.
        down, up: ``[R, n · E]`` and ``[n · E, R]``.
    """

    def __init__(self, embed_dim: int, config: LowRankConnectionsConfig) -> None:
        super().__init__()
        self.config, width = config, config.count * embed_dim
        self.norm = HeadNorm(config.count, embed_dim, config.norm)
        self.down = nn.Linear(width, config.rank, bias=False)
        self.up = nn.Linear(config.rank, width, bias=False)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., n, E]`` to x ``[..., E]`` and the normed streams ``[..., n · E]``."""
        normed = self.norm(streams)
        flat = normed.flatten(-2)
        weights = linear(F.silu(linear(flat, self.down) / self.config.count), self.up)
        weights = torch.sigmoid(weights).view_as(normed)
        return (weights * normed).mean(dim=-2), flat


class LowRankConnections(StreamMixer):
    """Reads and writes the streams around one part of a layer; see the module.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams, rank, norm.

    Attributes:
        sum: What is read.
        inject: ``[n, n · E]`` Wc.
    """

    def __init__(self, embed_dim: int, config: LowRankConnectionsConfig) -> None:
        super().__init__()
        self.config, n = config, config.count
        self.sum = LowRankSum(embed_dim, config)
        self.inject = nn.Linear(n * embed_dim, n, bias=False)

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, flat = self.sum(streams)
        return x, (streams, 2 * torch.sigmoid(linear(flat, self.inject) / self.config.count))

    def write(self, kept: tuple[Tensor, Tensor], made: Tensor) -> Tensor:
        streams, weights = kept
        return streams + weights[..., None] * made[..., None, :]


class LowRankEnds(StreamEnds):
    """Copies the embedding into all streams, and reads one vector of them at last.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams, rank, norm.
    """

    def __init__(self, embed_dim: int, config: LowRankConnectionsConfig) -> None:
        super().__init__()
        self.config = config
        self.sum = LowRankSum(embed_dim, config)

    def enter(self, x: Tensor) -> Tensor:
        return x[..., None, :].expand(*x.shape[:-1], self.config.count, x.shape[-1])

    def leave(self, streams: Tensor) -> Tensor:
        x: Tensor = self.sum(streams)[0]
        return x


register_streams(LowRankConnectionsConfig, LowRankConnections, LowRankEnds)
