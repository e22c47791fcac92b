"""Differential attention as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from polyhead.config.attention import AttentionConfig, greatest_divisor
from polyhead.config.layout import NORMED_HALF, CallCost, Prefill, shared
from polyhead.config.memories import Memory, PerToken
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


def first_lambda(layer: int) -> float:
    """λ₀ of a layer, counted from 0: 0.8 − 0.6 · exp(−0.3 · layer)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


@dataclass(frozen=True)
class DifferentialAttentionConfig(AttentionConfig, kind="differential"):
    """``AttentionConfig`` whose heads come in pairs.

    ``lambda_init`` is λ₀ (``first_lambda`` of the layer's number), ``norm_eps`` that of the RMSNorm
    without weights over the 2 D features of a pair's output.

    Raises:
        ConfigError: Heads that make no pairs, or what has no meaning for a difference.
    """

    lambda_init: float = 0.8
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads % 2:
            raise ConfigError(
                f"num_kv_heads must be even, since heads are paired: got {self.num_kv_heads}"
            )
        if self.alibi is not None:
            raise ConfigError("differential attention has no alibi: its heads come in pairs")
        if self.dropout or self.sinks or self.v_head_dim not in (None, self.head_dim):
            raise ConfigError(
                "differential attention has no dropout of weights, no sinks and values as large "
                f"as keys: got dropout={self.dropout}, sinks={self.sinks}, v_head_dim="
                f"{self.v_head_dim}, head_dim={self.head_dim}"
            )

    @property
    def layout(self) -> str:
        return f"differential {super().layout}"

    @property
    def value_dim(self) -> int:
        return 2 * self.head_dim

    @property
    def output_heads(self) -> int:
        return self.num_heads // 2

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (PerToken(self.num_kv_heads // 2, 2 * self.head_dim, 2 * self.head_dim),)

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", 1, 4 * self.head_dim, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        return CallCost(self.num_heads * 4 * self.head_dim)

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        """As many kv heads at most, and two at least, which make a pair."""
        pairs = greatest_divisor(self.num_heads // 2, num_kv_heads // 2)
        return replace(self, num_kv_heads=2 * pairs)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        Q = shared(self.output_heads, call.ranks) * self.value_dim
        K = shared(self.kv.num_kv_heads, call.ranks) * self.value_dim
        # Projected q, k and v with their pairs, queries beside zeros twice (apart and stacked); or
        # pairs and both outputs with their difference, its norm and what is left of it.
        normed = NORMED_HALF + 1 if call.half else 3
        return max(plain, 5 * Q + 4 * K, 2 * K + (4 + normed) * Q)
