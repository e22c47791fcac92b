"""Heads that forget by a gate of each token, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import Prefill, shared
from polyhead.config.memories import Memory, PerToken
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ForgettingAttentionConfig(AttentionConfig, kind="forgetting"):
    """``AttentionConfig`` of a decoder whose heads forget (Lin et al. 2025).

    The logarithm of each head's gate is remembered of every token.

    Raises:
        ConfigError: As ``AttentionConfig``, or what does not go with gates.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alibi is not None or self.window_ahead is not None or self.hands_on_keys:
            raise ConfigError(
                "forget gates are the only bias, of earlier keys of the layer's own: got "
                f"alibi={self.alibi}, window_ahead={self.window_ahead}, "
                f"hands_on_keys={self.hands_on_keys}"
            )

    @property
    def layout(self) -> str:
        return f"forgetting {super().layout}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        H = self.num_heads
        return (*super().memories, PerToken(1, H, H, latent=True, name="gates"))

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, embed_dim)
        yield ParameterGroup("attention", self.num_heads, 1, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        # Gates and their logarithms; these and their sums of keys and queries in float64.
        wide = H * (4 if call.half else 2)
        return max(plain + 2 * wide, made + 6 * wide)
