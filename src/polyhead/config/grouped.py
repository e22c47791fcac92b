"""Attention and networks whose projections are grouped, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class GroupedAttentionConfig(AttentionConfig, kind="grouped"):
    """``AttentionConfig`` whose projections cut features into groups, each made of its own part.

    Attributes:
        q_groups, k_groups, v_groups, o_groups: Groups of each projection; 1: not cut.
    """

    q_groups: int = 1
    k_groups: int = 1
    v_groups: int = 1
    o_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = {
            "q_groups": self.num_heads * self.head_dim,
            "k_groups": self.num_kv_heads * self.head_dim,
            "v_groups": self.num_kv_heads * self.value_dim,
            "o_groups": self.num_heads * self.value_dim,
        }
        for name, width in widths.items():
            check_divisor(name, getattr(self, name), width)
        if self.values_from_keys:
            raise ConfigError("grouped projections have one of values: got values_from_keys=True")

    @property
    def layout(self) -> str:
        return f"grouped {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        C = embed_dim if context_dim is None else context_dim
        H, G, D, V = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        projected = (
            (H, D, embed_dim, self.q_groups, self.qkv_bias),
            (G, D, C, self.k_groups, self.has_k_bias),
            (G, V, C, self.v_groups, self.qkv_bias),
        )
        for units, size, features, groups, bias in projected:
            yield ParameterGroup("attention", 1, units * size * features // groups)
            if bias:
                yield ParameterGroup("attention", units, size, multiplied=False)
        yield ParameterGroup("attention", 1, H * V * embed_dim // self.o_groups)
        if self.out_bias:
            yield ParameterGroup("attention", 1, embed_dim, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        # A projection before its bias is added, or its groups side by side.
        return plain + shared(self.num_heads, call.ranks) * max(self.head_dim, self.value_dim)


@dataclass(frozen=True)
class GroupedFeedForwardConfig(FeedForwardConfig, kind="grouped"):
    """``FeedForwardConfig`` without gates whose projections cut features into groups.

    Attributes:
        up_groups, down_groups: Groups of each projection; 1: not cut.
    """

    up_groups: int = 1
    down_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("up_groups", "down_groups"):
            check_divisor(name, getattr(self, name), self.hidden_dim)
        if self.gated or self.activation == "xielu":
            raise ConfigError(
                "a grouped network has no gate and no learned activation: got "
                f"gated={self.gated}, activation={self.activation!r}"
            )

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        F, E = self.hidden_dim, embed_dim
        for groups in (self.up_groups, self.down_groups):
            yield ParameterGroup("feed_forward", 1, F * E // groups)
        if self.bias:
            yield ParameterGroup("feed_forward", F, 1, multiplied=False)
        if self.has_down_bias:
            yield ParameterGroup("feed_forward", 1, E, multiplied=False)


def check_divisor(name: str, groups: int, features: int) -> None:
    """Raises ConfigError unless so many groups divide the features."""
    check_whole(name, groups)
    if features % groups:
        raise ConfigError(f"{name} must divide {features} features: got {groups}")
