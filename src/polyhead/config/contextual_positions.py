"""Attention with contextual position encoding (CoPE), as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import Prefill, shared
from polyhead.config.normalizer_attention import refuse_sinks
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class CoPEAttentionConfig(AttentionConfig, kind="cope"):
    """``AttentionConfig`` with positions that count keys (Golovneva et al. 2024, arXiv 2405.18719).

    Attributes:
        num_positions: Whole positions that have an embedding; farther keys share the last.

    Raises:
        ConfigError: As ``AttentionConfig``, or sinks.
    """

    num_positions: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("num_positions", self.num_positions)
        refuse_sinks(self, "contextual positions")

    @property
    def layout(self) -> str:
        return f"CoPE {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_positions, self.head_dim, as_numbers=True)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        return max(plain, made + H * (self.num_positions + 2 * self.value_dim))
