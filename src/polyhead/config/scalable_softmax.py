"""Attention by Scalable-Softmax, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ScalableSoftmaxAttentionConfig(AttentionConfig, kind="scalable_softmax"):
    """``AttentionConfig`` of a decoder whose scores grow with the logarithm of their number.

    Raises:
        ConfigError: As ``AttentionConfig``, or keys whose number a position does not say.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None or self.window_ahead is not None:
            raise ConfigError(
                "Scalable-Softmax counts the keys up to a query's own, of all or of a window: got "
                f"chunk={self.chunk}, window_ahead={self.window_ahead}"
            )

    @property
    def layout(self) -> str:
        return f"scalable-softmax {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, 1, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        Q = shared(self.num_heads, call.ranks) * self.head_dim
        K = shared(self.num_kv_heads, call.ranks) * (self.head_dim + self.value_dim)
        # Projected queries, those rotated or normed, and these scaled, in float32 at first.
        placed = self.rope is not None or self.qk_norm is not None
        return max(plain, K + Q * (1 + placed + (4 if call.half else 1)))
