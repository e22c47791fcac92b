"""Multi-token attention as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import Prefill, shared
from polyhead.config.memories import Memory, Tail
from polyhead.config.normalizer_attention import refuse_sinks
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class MultiTokenAttentionConfig(AttentionConfig, kind="multi_token"):
    """``AttentionConfig`` whose weights depend on neighbours (Golovneva et al. 2025, arXiv
    2504.00927). The layer is causal and remembers its last queries.

    Attributes:
        queries: Queries that a weight depends on, its own and at least one before it.
        keys: Keys that a weight depends on, around its own.
        mixed_heads: Neighbouring heads whose weights are mixed; 1: none.

    Raises:
        ConfigError: As ``AttentionConfig``, sizes that are impossible, heads that are no multiple
            of ``mixed_heads``, or sinks.
    """

    queries: int = 6
    keys: int = 11
    mixed_heads: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("queries", self.queries, least=2)
        check_whole("keys", self.keys)
        check_whole("mixed_heads", self.mixed_heads)
        if self.num_heads % self.mixed_heads:
            raise ConfigError(
                f"mixed_heads must divide num_heads={self.num_heads}: got {self.mixed_heads}"
            )
        refuse_sinks(self, "multi-token attention")

    @property
    def layout(self) -> str:
        return f"multi-token {super().layout}"

    @property
    def visible_window(self) -> int | None:
        """The window, and behind it what the earliest query saw that a weight depends on."""
        window = super().visible_window
        return None if window is None else window + self.queries - 1

    @property
    def memories(self) -> tuple[Memory, ...]:
        width = self.num_heads * self.head_dim
        return (*super().memories, Tail("queries", width, self.queries - 1))

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        size = self.queries * self.keys
        yield ParameterGroup("attention", self.num_heads, size, as_numbers=True)
        if self.mixed_heads > 1:
            yield ParameterGroup("attention", self.num_heads, self.mixed_heads, as_numbers=True)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # Queries behind those that are remembered are in memory of their own.
        H = shared(self.num_heads, call.ranks)
        return super().peak_activation_elements(embed_dim, call) + H * self.head_dim
