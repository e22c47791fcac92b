"""Attention with convolved keys and values that scores distances by content, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import CallCost, Prefill, shared
from polyhead.config.memories import Memory, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class DistanceProfilesAttentionConfig(AttentionConfig, kind="distance_profiles"):
    """``AttentionConfig`` of a decoder whose queries mix profiles of distances' scores (Inkling).

    Attributes:
        profiles: Profiles R that all heads have together.
        extent: Distances of a profile, from 0; those beyond score nothing.
        conv_kernel: Tokens that the convolutions of keys and of values see, at least 2.

    Raises:
        ConfigError: As ``AttentionConfig``, or what does not go with convolved keys.
    """

    profiles: int = field(kw_only=True)
    extent: int = field(kw_only=True)
    conv_kernel: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("profiles", self.profiles)
        check_whole("extent", self.extent)
        check_whole("conv_kernel", self.conv_kernel, least=2)
        if self.alibi is not None or self.values_from_keys or self.hands_on_keys:
            raise ConfigError(
                "distance profiles are the only bias, of keys and values of the layer's own: got "
                f"alibi={self.alibi}, values_from_keys={self.values_from_keys}, "
                f"hands_on_keys={self.hands_on_keys}"
            )

    @property
    def layout(self) -> str:
        return f"convolved {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, {self.profiles} profiles of {self.extent} distances"

    @property
    def memories(self) -> tuple[Memory, ...]:
        before = self.conv_kernel - 1
        k, v = (self.num_kv_heads * size for size in (self.head_dim, self.value_dim))
        return (*super().memories, Tail("k_inputs", k, before), Tail("v_inputs", v, before))

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        G, R, N = self.num_kv_heads, self.profiles, self.conv_kernel
        yield ParameterGroup("attention", self.num_heads, R * embed_dim)
        yield ParameterGroup("attention", 1, R * self.extent, as_numbers=True)
        convolved = (self.head_dim + self.value_dim) * N
        yield ParameterGroup("attention", G, convolved, as_numbers=True)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        plain = super().call_cost(batch_size, queries, cached)
        return CallCost(plain.per_pair, per_token=self.num_heads * self.profiles * self.extent)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        K, V = G * self.head_dim, G * self.value_dim
        # A table of distances, with their temperature a second one; convolutions with their tails.
        scored = 1 if self.query_temperature is None else 4 if call.half else 2
        made = H * self.head_dim + K + V
        return max(
            plain + H * (self.profiles + scored * (self.extent + 1)),
            made + (6 if call.half else 2) * max(K, V),
        )
