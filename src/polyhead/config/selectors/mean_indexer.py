"""Whole blocks chosen by an indexer's product with the mean of their keys (Qwen4-Exp), as plain
data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import ROTATED
from polyhead.config.memories import Memory, Pooled, Tail
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.selectors.base import SelectorConfig, check_rotated


@dataclass(frozen=True)
class MeanIndexerConfig(SelectorConfig, kind="mean_indexer"):
    """Qwen4-Exp's sparse attention (QSA, 2026), as transformers computes it.

    Queries and keys of its own score whole blocks, by one key for each: the mean of its tokens'
    keys, normed, and rotated as the first of them. All heads choose together: ``top_k`` whole
    blocks, and the tokens up to the query that are behind the last whole one.

    Attributes:
        num_heads: Heads of the indexer, which share one key per block.
        head_dim: Features of its queries and keys.
        norm: Over them.

    Raises:
        ConfigError: A size below 1, or blocks of one key.
    """

    size: int = 16
    top_k: int = 64
    num_heads: int = 4
    head_dim: int = 128
    norm: NormConfig = field(default_factory=lambda: NormConfig(weight_offset=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("size", self.size, least=2)
        for name in ("num_heads", "head_dim"):
            check_whole(name, getattr(self, name))

    @property
    def most_keys(self) -> int:
        return self.size * self.top_k + self.size - 1

    @property
    def name(self) -> str:
        return "QSA"

    def memories(self, heads: AttentionConfig) -> tuple[Memory, ...]:
        tail = Tail("unpooled", self.head_dim, self.size - 1)
        return (tail, Pooled("index", self.head_dim, self.size))

    def parameter_groups(self, embed_dim: int, heads: AttentionConfig) -> Iterator[ParameterGroup]:
        yield ParameterGroup("attention", 1, (self.num_heads + 1) * self.head_dim * embed_dim)
        yield ParameterGroup("norms", 1, 2 * self.norm.parameters(self.head_dim), multiplied=False)

    def choice_cost(self, heads: AttentionConfig) -> int:
        return -(-self.num_heads * self.head_dim // self.size)

    def choices(self, heads: AttentionConfig) -> int:
        return 1

    @property
    def made_elements(self) -> int:
        return (1 + ROTATED) * self.num_heads * self.head_dim

    def check(self, heads: AttentionConfig) -> None:
        check_rotated(self.head_dim, heads)
