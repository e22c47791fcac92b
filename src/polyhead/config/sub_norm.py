"""Attention and networks with a norm before their last projection, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import NORMED_HALF, Prefill, shared
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class SubNormAttentionConfig(AttentionConfig, kind="sub_norm"):
    """``AttentionConfig`` with a norm over all heads' outputs together, before ``o_proj``."""

    out_norm: NormConfig = field(default_factory=NormConfig)

    @property
    def layout(self) -> str:
        return f"sub-norm {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        size = self.out_norm.parameters(self.value_dim)
        yield ParameterGroup("norms", self.num_heads, size, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        # Beside q, k and v the heads' outputs, the same side by side, and the norm of them.
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        return max(plain, made + (2 + (NORMED_HALF if call.half else 1)) * H * self.value_dim)


@dataclass(frozen=True)
class SubNormFeedForwardConfig(FeedForwardConfig, kind="sub_norm"):
    """``FeedForwardConfig`` with a norm of the hidden features, before ``down_proj``."""

    norm: NormConfig = field(default_factory=NormConfig)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        size = self.norm.parameters(self.hidden_dim)
        yield ParameterGroup("norms", 1, size, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, ranks: int) -> int:
        # Beside the hidden features their norm, at most in float32.
        normed = (1 + NORMED_HALF) * shared(self.hidden_dim, ranks)
        return max(super().peak_activation_elements(embed_dim, ranks), normed)
