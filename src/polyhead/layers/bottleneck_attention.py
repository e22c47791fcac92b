"""Attention and networks in a narrow residual stream, which a wide one is made into and made of.

    n   = norm(x W1)
    h_0 = norm(n + Attention(s, s, x) Wo)       s = norm(x W2); or Attention(n, n, n)
    h_i = norm(h_{i-1} + network_i(h_{i-1}))
    out = h_last W3

Sun et al. 2020, "MobileBERT", §3.1-3.3. The wide stream's sum and norm are the layer's own.

Shape letters: B batch, H query heads, T tokens, V value size, E embed size, N narrow size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from polyhead.config import (
    AttentionConfig,
    BottleneckAttentionConfig,
    FeedForwardConfig,
    NormConfig,
)
from polyhead.layers import fused
from polyhead.layers.handed import Handed
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import build_network, register_builder
from polyhead.layers.sparse_encoder import SparseEncoderAttention
from polyhead.semantics import Bias, DenseSource, KeyLengths


class Narrow(nn.Module):
    """norm(x W + b).

    Args:
        embed_dim: Features of ``x``.
        dim: Features of the result.
        norm: Over it.
    """

    def __init__(self, embed_dim: int, dim: int, norm: NormConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(embed_dim, dim)
        self.norm = build_norm(dim, norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, N]``."""
        narrow: Tensor = self.norm(linear(x, self.dense))
        return narrow


class NarrowNetwork(nn.Module):
    """norm(network(x) + x).

    Args:
        dim: Features of ``x``.
        config: Of the network.
        norm: Over the sum.
    """

    def __init__(self, dim: int, config: FeedForwardConfig, norm: NormConfig) -> None:
        super().__init__()
        self.feed_forward = build_network(dim, config)
        self.norm = build_norm(dim, norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, N]`` to the same."""
        made: Tensor = self.norm(self.feed_forward(x) + x)
        return made


class BottleneckAttention(SparseEncoderAttention):
    """``MultiHeadAttention`` with networks in a narrow stream; built from its config.

    Attributes:
        narrow: Makes the narrow stream.
        for_scores: Makes what queries and keys are projected from, or None.
        heads_norm: Over the sum behind attention.
        networks: Behind it, each with its norm.
        wide_proj: Makes the wide stream's part.
    """

    config_class: ClassVar[type[AttentionConfig]] = BottleneckAttentionConfig
    config: BottleneckAttentionConfig

    def _add_modules(self) -> None:
        config, E, N = self.config, self.embed_dim, self.config.dim
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = self.get_submodule(name)
            if name != "v_proj" or not config.values_from_wide:
                assert isinstance(plain, nn.Linear)
                made = nn.Linear(N, plain.out_features, bias=plain.bias is not None)
                self.add_module(name, made)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, N, bias=config.out_bias)
        self.narrow = Narrow(E, N, config.norm)
        self.for_scores = Narrow(E, N, config.norm) if config.values_from_wide else None
        self.heads_norm = build_norm(N, config.norm)
        self.networks = nn.ModuleList(
            NarrowNetwork(N, each, config.norm) for each in config.networks
        )
        self.wide_proj = nn.Linear(N, E)

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        if self.for_scores is None:
            q, k, v = fused.linears(self.narrow(x), self.q_proj, self.k_proj, self.v_proj)
        else:
            q, k = fused.linears(self.for_scores(x), self.q_proj, self.k_proj)
            v = linear(x, self.v_proj)
        q, k = self._queries(q, 0), self._placed(k, self.num_kv_heads, "k_norm", 0)
        return self._attend(q, DenseSource(k, self._values(v)), mask=mask, **options)

    def _output(self, x: Tensor, heads: Tensor) -> Tensor:
        h = self.heads_norm(super()._output(x, heads) + self.narrow(x))
        for network in self.networks:
            h = network(h)
        return linear(h, self.wide_proj)


register_builder(BottleneckAttentionConfig, BottleneckAttention.from_config)
