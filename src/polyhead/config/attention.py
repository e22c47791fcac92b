"""One attention layer (MHA, GQA, MQA) as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from polyhead.config.data import Data
from polyhead.config.layout import NORMED_HALF, ROTATED, CacheShape, CallCost, HeadLayout, shared
from polyhead.config.norm import NormConfig
from polyhead.config.pieces import Piece
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class QKNormConfig(Data):
    """Normalised queries and keys; ``place`` is where, since three families do it differently.

    ``"before_rope"``: per head, before rotary (Qwen3, Gemma 3). ``"after_rope"``: per head, after
    rotary. ``"full_width"``: over all heads at once, before the split (OLMo 2).
    """

    norm: NormConfig = field(default_factory=NormConfig)
    place: Literal["before_rope", "after_rope", "full_width"] = "before_rope"


@dataclass(frozen=True)
class AttentionConfig(HeadLayout, kind="heads"):
    """One attention layer. ``num_kv_heads``: H is MHA, 1 is MQA, a divisor of H between is GQA."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None  # None: head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNormConfig | None = None
    window: int | None = None  # keys including the query itself
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1: got {value!r}")
        if self.num_heads % self.num_kv_heads:
            divisors = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise ConfigError(
                f"num_kv_heads must divide num_heads: got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}; use one of {divisors}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be at least 1 key or None: got {self.window!r}")
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap must be positive or None (off): got {self.softcap!r}")

    @property
    def rope_head_dim(self) -> int:
        """Features of a head that ``rope`` is over."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def layout(self) -> str:
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else f"GQA-{self.num_kv_heads}"

    @property
    def described(self) -> str:
        return (
            f"{self.layout} {self.num_heads} query / {self.num_kv_heads} kv heads × {self.head_dim}"
        )

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def visible_window(self) -> int | None:
        return self.window

    def pieces(self, embed_dim: int) -> Iterator[Piece]:
        E, H, G, D, V = embed_dim, self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        for units, size in ((H, D), (G, D), (G, V)):
            yield Piece("attention", units, size * E)
            if self.qkv_bias:
                yield Piece("attention", units, size, multiplied=False)
        yield Piece("attention", H, V * E)
        if self.out_bias:
            yield Piece("attention", 1, E, multiplied=False)
        if self.sinks:
            yield Piece("attention", H, 1, multiplied=False)
        if self.qk_norm is not None:
            full = self.qk_norm.place == "full_width"
            for units in (H, G):
                size = self.qk_norm.norm.parameters(D)
                yield Piece("norms", units if full else 1, size, multiplied=False)

    def call_cost(self, batch: int, queries: int, cached: int) -> CallCost:
        return CallCost(self.num_heads * (self.head_dim + self.value_dim))

    def alive_elements(
        self, embed_dim: int, *, tokens: int, batch: int, ranks: int, half: bool
    ) -> int:
        H, G = shared(self.num_heads, ranks), shared(self.num_kv_heads, ranks)
        Q, K, V = H * self.head_dim, G * self.head_dim, self.value_dim
        made, copies = Q + K + G * V, self._copies(half)
        return made + max(copies * Q, Q + copies * K if copies else 0, 2 * H * V + embed_dim)

    def _copies(self, half: bool) -> int:
        """Times the size of projected q or k that norming and rotating it holds beside it."""
        rotated = 0 if self.rope is None else ROTATED
        if self.qk_norm is None:
            return rotated
        normed = NORMED_HALF if half else 1
        if self.rope is None:
            return normed
        last = self.qk_norm.place == "after_rope"
        first, second = (rotated, normed) if last else (normed, rotated)
        return max(first, 1 + second)

    def with_kv_heads(self, kv_heads: int) -> AttentionConfig:
        most, H = min(kv_heads, self.num_heads), self.num_heads
        return replace(self, num_kv_heads=max(g for g in range(1, most + 1) if not H % g))
