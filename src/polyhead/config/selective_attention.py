"""Attention whose queries choose blocks of keys, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import AttentionSpan, CallCost, Prefill
from polyhead.config.memories import Memory
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.selectors import BlockMeansConfig, SelectorConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class SelectiveAttentionConfig(AttentionConfig, kind="selective"):
    """``AttentionConfig`` whose queries choose blocks of keys; causal.

    Attributes:
        selector: How they choose.
    """

    selector: SelectorConfig = field(default_factory=BlockMeansConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_ahead is not None:
            raise ConfigError(
                "heads that choose blocks are causal and see nothing ahead: got "
                f"window_ahead={self.window_ahead}"
            )
        self.selector.check(self)

    @property
    def layout(self) -> str:
        return f"{self.selector.name} {super().layout}"

    @property
    def described(self) -> str:
        chosen = self.selector
        return f"{super().described}, {chosen.top_k} blocks of {chosen.size} keys that it chooses"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (*super().memories, *self.selector.memories(self))

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(self.window, chunk=self.chunk, chosen=self.selector.most_keys)

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield from self.selector.parameter_groups(embed_dim, self)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        dense = super().call_cost(batch_size, queries, cached)
        return CallCost(dense.per_pair, per_choice=self.selector.choice_cost(self))

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        dense = super().peak_activation_elements(embed_dim, call)
        # Beside q, k and v the numbers of the chosen blocks, which have 64 bits, five times while
        # they are sorted.
        blocks = min(self.selector.top_k, -(-call.tokens // self.selector.size))
        sorted_blocks = 5 * (4 if call.half else 2) * blocks * self.selector.choices(self)
        return dense + max(sorted_blocks, self.selector.made_elements)
