"""Hyper-connections: weights of reading and writing residual streams that depend on the token.

    r = W [s_1 … s_n] / rms(s_1 … s_n)      a = σ(α_a r_a + b_a) + ε      c = m σ(α_c r_c + b_c) + ε
    x = Σ_i a_i s_i                         s_i = s_i + c_i f(x)

with f a part of a layer. At first all streams are the embedding; at last they are summed with
weights that are made as a. Zhu et al. 2024, arXiv 2409.19606; HY 4 (Tencent, 2026), whose streams
are mixed with each other in no other way. DeepSeek-V4's (2026) are:

    s_i = Σ_j M_ji s_j + c_i f(x)           M = sinkhorn(softmax(α_m r_m + b_m) + ε)

with c without ε, and M scaled until its columns and rows sum to 1, columns last (Xie et al. 2025,
arXiv 2512.24880). GLM-5.3 (2026) gives the mean of the streams at last.

Shape letters: B batch, T tokens, n streams, E embed size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyhead.config import HyperConnectionsConfig, MixedConnectionsConfig
from polyhead.layers.linear import product
from polyhead.layers.streams import StreamEnds, StreamMixer, register_streams


class HyperConnections(StreamMixer):
    """Reads and writes the streams around one part of a layer; see the module.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams, magnitude of what is written.

    Attributes:
        weight: ``[2 n, n · E]`` W, for reading and for writing.
        bias: ``[2 n]`` b.
        factors: ``[2]`` α.
    """

    def __init__(self, embed_dim: int, config: HyperConnectionsConfig) -> None:
        super().__init__()
        self.config, n = config, config.count
        self.weight = nn.Parameter(torch.empty(2 * n, n * embed_dim))
        self.bias, self.factors = nn.Parameter(torch.empty(2 * n)), nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the average of the streams to be read and each to be written to, all but for W."""
        _reset(self.weight, self.bias, self.factors, self.config.count)

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        c, made = self.config, _weights(streams, self.weight, self.config.norm_eps)
        to_read, to_write = (
            torch.sigmoid(part * factor + bias)
            for part, factor, bias in zip(
                made.chunk(2, -1), self.factors.unbind(), self.bias.chunk(2), strict=True
            )
        )
        x = _summed(streams, to_read + c.eps)
        return x, (streams, c.magnitude * to_write + c.eps)

    def write(self, kept: tuple[Tensor, Tensor], made: Tensor) -> Tensor:
        streams, weights = kept
        return (streams + weights[..., None] * made[..., None, :]).to(streams.dtype)


class MixedConnections(StreamMixer):
    """Reads and writes the streams around one part of a layer and mixes them; see the module.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams, magnitude of what is written, iterations.

    Attributes:
        weight: ``[2 n + n², n · E]`` W, for reading, for writing and for M.
        bias: ``[2 n + n²]`` b.
        factors: ``[3]`` α.
    """

    def __init__(self, embed_dim: int, config: MixedConnectionsConfig) -> None:
        super().__init__()
        self.config, n = config, config.count
        rows = 2 * n + n * n
        self.weight = nn.Parameter(torch.empty(rows, n * embed_dim))
        self.bias, self.factors = nn.Parameter(torch.empty(rows)), nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the average of the streams to be read and each to be written to, and streams to stay
        nearly as they are, all but for W.
        """
        n = self.config.count
        _reset(self.weight, self.bias, self.factors, n)
        with torch.no_grad():
            self.bias[2 * n :] = 8.0 * torch.eye(n).flatten()

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        c, n = self.config, self.config.count
        made = _weights(streams, self.weight, c.norm_eps)
        sizes = [n, n, n * n]
        to_read, to_write, to_mix = (
            part * factor + bias
            for part, factor, bias in zip(
                torch.split(made, sizes, dim=-1),
                self.factors.unbind(),
                torch.split(self.bias, sizes),
                strict=True,
            )
        )
        x = _summed(streams, torch.sigmoid(to_read) + c.eps)
        return x, (streams, c.magnitude * torch.sigmoid(to_write), self._balanced(to_mix))

    def write(self, kept: tuple[Tensor, Tensor, Tensor], made: Tensor) -> Tensor:
        streams, weights, mix = kept
        mixed = torch.matmul(mix.mT.to(streams.dtype), streams)
        return mixed + weights.to(streams.dtype)[..., None] * made[..., None, :]

    def _balanced(self, made: Tensor) -> Tensor:
        """``[..., n, n]`` M, from ``[..., n²]``."""
        n, eps = self.config.count, self.config.eps
        mix = made.view(*made.shape[:-1], n, n).softmax(dim=-1) + eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.config.iterations - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        return mix


class HyperConnectionEnds(StreamEnds):
    """Copies the embedding into all streams, and sums them with weights at last.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams.

    Attributes:
        weight: ``[n, n · E]`` W.
        bias: ``[n]`` b.
        factors: ``[1]`` α.
    """

    def __init__(self, embed_dim: int, config: HyperConnectionsConfig) -> None:
        super().__init__()
        self.config, n = config, config.count
        self.weight = nn.Parameter(torch.empty(n, n * embed_dim))
        self.bias, self.factors = nn.Parameter(torch.empty(n)), nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the average of the streams to be given, but for W."""
        _reset(self.weight, self.bias, self.factors, self.config.count)

    def enter(self, x: Tensor) -> Tensor:
        return x[..., None, :].expand(*x.shape[:-1], self.config.count, x.shape[-1])

    def leave(self, streams: Tensor) -> Tensor:
        made = _weights(streams, self.weight, self.config.norm_eps)
        weights = torch.sigmoid(made * self.factors + self.bias) + self.config.eps
        return _summed(streams, weights)


class MeanEnds(StreamEnds):
    """Copies the embedding into all streams, and gives their mean at last.

    Args:
        count: Number of streams.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def enter(self, x: Tensor) -> Tensor:
        return x[..., None, :].expand(*x.shape[:-1], self.count, x.shape[-1])

    def leave(self, streams: Tensor) -> Tensor:
        return streams.mean(dim=-2)


def _mixed_ends(embed_dim: int, config: MixedConnectionsConfig) -> StreamEnds:
    if config.at_end == "mean":
        return MeanEnds(config.count)
    return HyperConnectionEnds(embed_dim, config)


def _weights(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[..., rows]`` r in float32 or more, of streams ``[..., n, E]``."""
    flat = streams.flatten(-2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    size = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return product(flat, weight.to(flat.dtype), None) * size


def _summed(streams: Tensor, weights: Tensor) -> Tensor:
    """``[..., E]`` the sum of streams ``[..., n, E]`` with ``[..., n]``."""
    return (weights[..., None] * streams).sum(dim=-2).to(streams.dtype)


def _reset(weight: Tensor, bias: Tensor, factors: Tensor, count: int) -> None:
    nn.init.normal_(weight, std=0.02)
    nn.init.constant_(factors, 0.01)
    nn.init.zeros_(bias)
    with torch.no_grad():
        bias[:count] = -math.log(count - 1)  # σ of it is 1 / n


register_streams(HyperConnectionsConfig, HyperConnections, HyperConnectionEnds)
register_streams(MixedConnectionsConfig, MixedConnections, _mixed_ends)
