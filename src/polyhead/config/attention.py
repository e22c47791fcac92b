"""One attention layer (MHA, GQA, MQA) as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from polyhead.config.data import Data
from polyhead.config.norm import NormConfig
from polyhead.config.rope import RopeConfig
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
class AttentionConfig(Data):
    """One attention layer. ``num_kv_heads``: H is MHA, 1 is MQA, a divisor of H between is GQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None  # None: head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    rope: RopeConfig | None = None
    qk_norm: QKNormConfig | None = None
    window: int | None = None  # keys including the query itself
    softcap: float | None = None
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    sinks: bool = False
    dropout: float = 0.0

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
