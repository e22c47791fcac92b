"""Tensor product attention: queries, keys and values are sums of a few outer products.

    Q_h = 1/R_Q Σ_r a_{r,h} b_r        [a | b] = x Wq: R_Q vectors over heads and over features

and likewise K_h and V_h of R_K and R_V. A cache keeps the vectors a and b of keys and values, those
over features rotated, (R_K + R_V)(H + D) numbers of a token; keys and values of a call are made
from them. Zhang et al. 2025, "Tensor Product Attention Is All You Need", arXiv 2501.06425, §3.

Shape letters: B batch, H heads, T queries, S keys, D head size, E embed size, R a rank.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.caches import KeyValueCache
from polyhead.config import TensorProductAttentionConfig
from polyhead.errors import ConfigError
from polyhead.layers import fused
from polyhead.layers.attention_parts import check_cache, check_input, places_of
from polyhead.layers.handed import Handed
from polyhead.layers.hooks import Hooked
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, DenseSource, KeyValueSource, Mask, Window
from polyhead.semantics.argument_hints import refuse


class TensorProductAttention(Hooked):
    """Self-attention on outer products, built by ``from_config``.

    Attributes:
        config: Sizes and options as data; it cannot be assigned, nor can the sizes.
        scale, dropout, rope: As the next call takes them; they may be assigned.
        q_proj, k_proj, v_proj: ``[R · (H + D), E]``: rows of R vectors over heads, then of R over
            features.
        o_proj: ``[E, H · D]``.
    """

    _fixed = frozenset(["config", "embed_dim", "num_heads"])
    projects_heads = False

    @classmethod
    def from_config(
        cls, embed_dim: int, config: TensorProductAttentionConfig, *, rope: RoPE | None = None
    ) -> Self:
        """The layer that ``config`` describes.

        Args:
            embed_dim: Embedding size E of the residual stream.
            config: Sizes, biases, positions, scale.
            rope: Rotary positions built from ``config.rope`` already, to share their tables.

        Raises:
            ConfigError: A ``rope`` of another configuration.
        """
        layer = cls.__new__(cls)
        Hooked.__init__(layer)
        layer._build(embed_dim, config, rope)
        return layer

    def _build(
        self, embed_dim: int, config: TensorProductAttentionConfig, rope: RoPE | None
    ) -> None:
        check_int("embed_dim", embed_dim, least=1, error=ConfigError)
        if rope is not None and rope.config != config.rope:
            raise ConfigError(f"rope must be built from config.rope={config.rope}: got {rope}")
        self.config, self.embed_dim, self.num_heads = config, embed_dim, config.num_heads
        self.scale, self.dropout = config.score_scale, config.dropout
        self._window = None if config.window is None else Window(config.window)
        size = config.num_heads + config.head_dim
        self.q_proj = nn.Linear(embed_dim, config.q_rank * size, bias=config.bias)
        self.k_proj = nn.Linear(embed_dim, config.k_rank * size, bias=config.bias)
        self.v_proj = nn.Linear(embed_dim, config.v_rank * size, bias=config.bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, embed_dim, bias=config.bias)
        self.rope = rope
        if rope is None and config.rope is not None:
            self.rope = RoPE.from_config(config.rope, config.head_dim)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Self-attention of ``x`` to itself and to what the cache holds.

        Args:
            x: ``[B, T, E]``.
            mask: Who may look at whom; None: everything is visible. A window is added to it.
            bias: Added to the scores: ``ALiBi``, ``RelativeBias`` or ``[B, H, T, S]``.
            positions: ``[T]`` or ``[B, T]`` of ``x``; default: they follow on from the cache.
            cache: What is remembered, of one kv head whose key and value are the vectors.
            kernel: ``"auto"`` or the name of a kernel.
            handed: What layers of the same call hand on; this one reads nothing.
            **unknown: Refused; the error says what polyhead calls an argument of torch's.

        Returns:
            ``[B, T, E]`` in the dtype of ``x``.

        Raises:
            ValueError: Shapes that do not fit, named.
            TypeError: An argument that there is not, or of another kind, such as a cache's class.
        """
        if unknown:
            refuse(type(self).__name__, unknown)
        if cache is not None:
            check_cache(cache)
        check_input(x, self.embed_dim)
        positions, at = places_of(x, positions, cache)
        q, k, v = fused.linears(x, self.q_proj, self.k_proj, self.v_proj)
        k = torch.cat([part.flatten(2) for part in self._rotated(k, at)], dim=-1)
        k, v = k[:, None], v[:, None]
        q = _means_of_products(*self._rotated(q, at))
        source: KeyValueSource = DenseSource(k, v, positions)
        if cache is not None:
            source = cache.append(k, v, positions)
        del k, v
        if self._window is not None:
            mask = self._window if mask is None else mask & self._window
        heads = self._attend(
            q,
            self._expanded(source),
            mask=mask,
            bias=bias,
            scale=self.scale,
            q_positions=positions,
            dropout_p=self.dropout if self.training else 0.0,
            kernel=kernel,
        )
        return linear(self._edited(heads).transpose(1, 2).flatten(2), self.o_proj)

    def _rotated(self, vectors: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of ``_split``, those over features rotated."""
        over_heads, over_features = self._split(vectors)
        if self.rope is not None:
            over_features = self.rope.apply(over_features, positions, head_axis=2)
        return over_heads, over_features

    def _split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, R, H]`` and ``[B, T, R, D]`` of ``[B, T, R(H + D)]``."""
        H, D = self.num_heads, self.config.head_dim
        B, T, size = vectors.shape
        rank = size // (H + D)
        over_heads, over_features = vectors[..., : rank * H], vectors[..., rank * H :]
        return over_heads.reshape(B, T, rank, H), over_features.reshape(B, T, rank, D)

    def _expanded(self, source: KeyValueSource) -> DenseSource:
        """Keys and values ``[B, H, S, D]`` of all tokens of a source."""
        return DenseSource.remade(source, lambda k, v: (self._product(k), self._product(v)))

    def _product(self, vectors: Tensor) -> Tensor:
        """``[B, H, S, D]`` of ``[B, 1, S, R(H + D)]``."""
        return _means_of_products(*self._split(vectors[:, 0]))

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, {self.config.described}"]
        if self.rope is not None:
            parts.append(repr(self.rope))
        return ", ".join(parts)


def _means_of_products(over_heads: Tensor, over_features: Tensor) -> Tensor:
    """``[B, H, T, D]`` of ``[B, T, R, H]`` and ``[B, T, R, D]``."""
    return ((over_heads / over_heads.shape[2]).mT @ over_features).transpose(1, 2)


register_builder(TensorProductAttentionConfig, TensorProductAttention.from_config)
