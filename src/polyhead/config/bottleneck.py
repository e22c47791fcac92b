"""Attention and networks in a narrow stream of their own, as plain data (MobileBERT's layers)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import Prefill, shared
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class BottleneckAttentionConfig(AttentionConfig, kind="bottleneck"):
    """``AttentionConfig`` of an encoder within a residual stream of ``dim`` features.

    Attributes:
        dim: Features of the narrow stream.
        norm: Over what is made narrow, and over the sum behind each part.
        networks: One after the other, behind attention.
        values_from_wide: Values are made of the wide stream, and queries and keys of a narrow one
            of their own; False: all of the narrow stream.
    """

    dim: int = 0
    norm: NormConfig = field(default_factory=NormConfig)
    networks: tuple[FeedForwardConfig, ...] = ()
    values_from_wide: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("bottleneck dim", self.dim)
        check_plain(self, "heads in a bottleneck")
        if self.window is not None:
            raise ConfigError(f"heads in a bottleneck have no window: got {self.window}")

    @property
    def layout(self) -> str:
        return f"bottleneck {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        E, N, wide = embed_dim, self.dim, self.values_from_wide
        H, G, D, V = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        values = G * V, E if wide else N, self.qkv_bias
        narrowed = ((N, E, True),) * (2 if wide else 1)
        projected = (H * D, N, self.qkv_bias), (G * D, N, self.has_k_bias), values
        for size, features, bias in (
            *narrowed, *projected, (N, H * V, self.out_bias), (E, N, True)
        ):  # fmt: skip
            yield ParameterGroup("attention", 1, size * features)
            if bias:
                yield ParameterGroup("attention", 1, size, multiplied=False)
        for network in self.networks:
            yield from network.parameter_groups(N)
        for _ in range(len(narrowed) + 1 + len(self.networks)):
            yield ParameterGroup("norms", 1, self.norm.parameters(N), multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(self.dim, call)
        networks = (each.peak_activation_elements(self.dim, call.ranks) for each in self.networks)
        # Beside them what is made narrow, before its norm and behind, or what is made wide again.
        heads = shared(self.num_heads, call.ranks) * self.value_dim
        return max(plain + heads, *networks, embed_dim) + 3 * self.dim
