"""Tensor product attention as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_share, check_whole
from polyhead.config.layout import (
    ROTATED,
    AttentionSpan,
    CallCost,
    HeadLayout,
    Prefill,
)
from polyhead.config.memories import Memory, PerToken
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class TensorProductAttentionConfig(HeadLayout, kind="tensor_product"):
    """One tensor product attention layer (Zhang et al. 2025, arXiv 2501.06425, §3).

    Queries, keys and values of a token are sums of ``q_rank``, ``k_rank`` and ``v_rank`` outer
    products of a vector over heads with one over features. A cache keeps the vectors:
    (k_rank + v_rank)(H + D) numbers of a token. ``rope`` rotates those over features. ``scale``
    None is 1/√D. ``window``: keys behind a query that it sees, itself included; None: all.

    Raises:
        ConfigError: A size that is impossible, or a ``rope`` over other than ``head_dim`` features.
    """

    head_dim: int
    q_rank: int = 6
    k_rank: int = 2
    v_rank: int = 2
    bias: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "q_rank", "k_rank", "v_rank"):
            check_whole(name, getattr(self, name))
        if self.window is not None:
            check_whole("window", self.window)
        if self.rope is not None and (self.rope.dim or self.head_dim) > self.head_dim:
            raise ConfigError(
                f"rope dim must be at most head_dim={self.head_dim}: got {self.rope.dim}"
            )
        check_share("dropout", self.dropout)

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope_head_dim(self) -> int:
        return self.head_dim

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(window=self.window)

    @property
    def layout(self) -> str:
        return "TPA"

    @property
    def described(self) -> str:
        ranks = f"ranks {self.q_rank}, {self.k_rank}, {self.v_rank}"
        return f"TPA {self.num_heads} heads × {self.head_dim}, {ranks}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        size = self.num_heads + self.head_dim
        return (PerToken(1, self.k_rank * size, self.v_rank * size),)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        size = (self.q_rank + self.k_rank + self.v_rank) * (self.num_heads + self.head_dim)
        yield ParameterGroup("attention", 1, size * embed_dim)
        yield ParameterGroup("attention", self.num_heads, self.head_dim * embed_dim)
        if self.bias:
            yield ParameterGroup("attention", 1, size + embed_dim, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        made = (self.k_rank + self.v_rank) * self.num_heads * self.head_dim
        return CallCost(2 * self.num_heads * self.head_dim, 2 * batch_size * cached * made)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        H, D = self.num_heads, self.head_dim
        heads = H * D
        of_queries = self.q_rank * (H + D)
        remembered = (self.k_rank + self.v_rank) * (H + D)
        # Vectors that are rotated; queries made of theirs; keys and values; outputs, in rows.
        made = of_queries + remembered + max(ROTATED * self.q_rank * D, heads)
        return max(made, remembered + 5 * heads + embed_dim)

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        most = min(num_kv_heads, self.num_heads)
        return AttentionConfig(self.num_heads, most, self.head_dim, rope=self.rope)
