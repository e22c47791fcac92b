"""Lightning attention as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead.config.data import check_choice, check_positive, check_whole
from polyhead.config.layout import CallCost, HeadLayout, Prefill, shared
from polyhead.config.memories import Memory, State
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class LightningAttentionConfig(HeadLayout, kind="lightning"):
    """Linear attention whose heads forget at fixed rates (MiniMax-01, 2025, arXiv 2501.08313).

    Attributes:
        head_dim: Features of a query, of a key and of a value.
        slope_scale: Head h of H, from 1 on, decays by exp(−slope_scale · 2^(−8h/H)) a token.
        activation: Of queries, keys and values.
        norm_eps: Of the RMSNorm over all heads' outputs.

    Raises:
        ConfigError: Sizes that do not go together, or what a state has no use for.
    """

    head_dim: int
    slope_scale: float = 1.0
    activation: Literal["silu", "gelu", "relu"] = "silu"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim"):
            check_whole(name, getattr(self, name))
        check_positive("slope_scale", self.slope_scale)
        check_choice("activation", self.activation, ("silu", "gelu", "relu"))
        if self.rope is not None or self.scale is not None or self.dropout:
            raise ConfigError(
                "Lightning attention has no rotary positions, no scale and no weights to drop: got "
                f"rope={self.rope}, scale={self.scale}, dropout={self.dropout}"
            )

    @property
    def layout(self) -> str:
        return "Lightning attention"

    @property
    def described(self) -> str:
        return f"{self.layout} {self.num_heads} states of {self.head_dim} × {self.head_dim}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (State("state", (self.num_heads, self.head_dim, self.head_dim)),)

    @property
    def num_kv_heads(self) -> int:
        """As many as heads: each has a key and a value of its own."""
        return self.num_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope_head_dim(self) -> int:
        return self.head_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        for _ in range(5):  # queries, keys, values, gates, output
            yield ParameterGroup("attention", self.num_heads, self.head_dim * embed_dim)
        yield ParameterGroup("norms", self.num_heads, self.head_dim, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        # A token writes the state and reads it.
        return CallCost(0, per_token=2 * self.num_heads * self.head_dim**2)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # Queries, keys and values as projected and activated; or the heads' outputs, joined, their
        # norm and the gate.
        width = shared(self.num_heads, call.ranks) * self.head_dim
        return (8 if call.half else 6) * width + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> LightningAttentionConfig:
        return self
