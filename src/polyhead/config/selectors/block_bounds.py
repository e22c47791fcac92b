"""Blocks chosen by the least and greatest features of their keys (Quest), as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.memories import Memory, Pooled
from polyhead.config.selectors.base import SelectorConfig


@dataclass(frozen=True)
class BlockBoundsConfig(SelectorConfig, kind="block_bounds"):
    """Quest (Tang et al. 2024, arXiv 2406.10774): for decoding with a model that was trained dense.

    A query chooses its own block and those where the greatest product that a key within the block's
    bounds could have with it is largest. It has no parameters, and is not meant for training.

    Attributes:
        shared: The heads that share a kv head choose together, by the sum of their bounds, so that
            keys are read once for all of them; else each for itself, as in the paper.
        max_queries: Calls of more tokens read all keys, as prompts do in the paper.
    """

    size: int = 16
    top_k: int = 64
    shared: bool = True
    max_queries: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_queries", self.max_queries)

    @property
    def name(self) -> str:
        return "Quest"

    def memories(self, heads: AttentionConfig) -> tuple[Memory, ...]:
        return (Pooled("blocks", 2 * heads.num_kv_heads * heads.head_dim, self.size),)

    def choice_cost(self, heads: AttentionConfig) -> int:
        return -(-2 * self.choices(heads) * heads.head_dim // self.size)

    def choices(self, heads: AttentionConfig) -> int:
        return heads.num_kv_heads if self.shared else heads.num_heads
