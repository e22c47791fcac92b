"""Blocks chosen by an indexer's best product within them (MiniMax-M3), as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.memories import Memory, PerToken
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.selectors.base import SelectorConfig, check_rotated
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class BlockIndexerConfig(SelectorConfig, kind="block_indexer"):
    """MiniMax-M3's indexer (2026), as transformers computes it.

    Queries and keys of its own, normed and rotated as those of the layer, score every key; a block
    counts as its best key. The query heads of one head of the indexer choose together.

    Attributes:
        num_heads: Heads of the indexer, which share one key per token; a divisor of the layer's.
        head_dim: Features of its queries and keys.
        norm: Over them.
        last_blocks: Blocks up to a query's own that are always chosen.

    Raises:
        ConfigError: A size below 1, or more blocks always chosen than are chosen.
    """

    size: int = 128
    top_k: int = 16
    num_heads: int = 4
    head_dim: int = 128
    norm: NormConfig = field(default_factory=lambda: NormConfig(weight_offset=1.0))
    last_blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "head_dim", "last_blocks"):
            check_whole(name, getattr(self, name))
        if self.top_k < self.last_blocks:
            raise ConfigError(
                f"top_k must be at least last_blocks={self.last_blocks}, which are always chosen: "
                f"got {self.top_k}"
            )

    @property
    def name(self) -> str:
        return "MSA"

    def memories(self, heads: AttentionConfig) -> tuple[Memory, ...]:
        return (PerToken(1, self.head_dim, self.head_dim, latent=True, name="index"),)

    def parameter_groups(self, embed_dim: int, heads: AttentionConfig) -> Iterator[ParameterGroup]:
        yield ParameterGroup("attention", 1, (self.num_heads + 1) * self.head_dim * embed_dim)
        yield ParameterGroup("norms", 1, 2 * self.norm.parameters(self.head_dim), multiplied=False)

    def choice_cost(self, heads: AttentionConfig) -> int:
        return self.num_heads * self.head_dim

    def choices(self, heads: AttentionConfig) -> int:
        return self.num_heads

    def check(self, heads: AttentionConfig) -> None:
        if heads.num_heads % self.num_heads:
            raise ConfigError(
                f"the indexer's num_heads must divide num_heads={heads.num_heads}: got "
                f"{self.num_heads}"
            )
        check_rotated(self.head_dim, heads)
