"""Attention with Transformer-XL's distances and XLNet's segments, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import EMBEDDING, SEGMENTS, CallCost, Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class RelativeAttentionConfig(AttentionConfig, kind="relative"):
    """``AttentionConfig`` of an encoder whose queries are compared with sinusoids of distances, and
    with two vectors: of keys of their own segment, and of keys of another.

    Attributes:
        max_distance: Distances beyond it count as it; None: each has its own sinusoids.
    """

    max_distance: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance is not None:
            check_whole("max_distance", self.max_distance)
        check_plain(self, "scores by sinusoids of distances")
        if self.window is not None or self.softcap is not None:
            raise ConfigError(
                "scores by sinusoids of distances go without window and softcap: got "
                f"window={self.window}, softcap={self.softcap}"
            )

    @property
    def layout(self) -> str:
        return f"relative {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, distances and segments"

    @property
    def reads(self) -> Mapping[str, int]:
        return {SEGMENTS: EMBEDDING}

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        H, D = self.num_heads, self.head_dim
        yield ParameterGroup("attention", H, D * embed_dim, multiplied=False)  # not for each token
        # Three biases and two vectors of segments.
        yield ParameterGroup("attention", H, 5 * D, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        plain = super().call_cost(batch_size, queries, cached)
        return CallCost(plain.per_pair, per_token=2 * queries * self.num_heads * self.head_dim)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H = shared(self.num_heads, call.ranks)
        # Of 2 T distances the table with segments and the one without, whose segments they are, and
        # the projected sinusoids.
        return plain + (3 * H + 2) * 2 * call.tokens + 2 * (embed_dim + H * self.head_dim)
