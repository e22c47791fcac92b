"""Blocks chosen by the mean of their keys (MoBA), as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.memories import Memory, Pooled
from polyhead.config.selectors.base import SelectorConfig


@dataclass(frozen=True)
class BlockMeansConfig(SelectorConfig, kind="block_means"):
    """Mixture of block attention (MoBA; Lu et al. 2025, arXiv 2502.13189).

    Every head chooses its own block and the blocks whose mean key has the largest product with its
    query. It has no parameters: a model can be trained with it, or change to it and back.
    """

    size: int = 512
    top_k: int = 3

    @property
    def name(self) -> str:
        return "MoBA"

    def memories(self, heads: AttentionConfig) -> tuple[Memory, ...]:
        return (Pooled("blocks", heads.num_kv_heads * heads.head_dim, self.size),)

    def choice_cost(self, heads: AttentionConfig) -> int:
        return -(-heads.num_heads * heads.head_dim // self.size)

    def choices(self, heads: AttentionConfig) -> int:
        return heads.num_heads
