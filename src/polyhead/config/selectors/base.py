"""A selector: which blocks of keys queries choose, as plain data.

A block is ``size`` tokens of a sequence that follow each other, counted from its first. A query
chooses among the blocks up to its own, the one that it is part of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import OneOfSeveral, check_whole
from polyhead.config.memories import Memory
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class SelectorConfig(OneOfSeveral, ABC):
    """How queries choose blocks of keys, of any kind.

    Attributes:
        size: Keys of a block.
        top_k: Blocks that a query chooses, its own among them.

    Raises:
        ConfigError: A size below 1.
    """

    where: ClassVar[Mapping[str, str]] = {
        "block_means": "polyhead.config.selectors.block_means",
        "block_bounds": "polyhead.config.selectors.block_bounds",
        "block_indexer": "polyhead.config.selectors.block_indexer",
        "mean_indexer": "polyhead.config.selectors.mean_indexer",
    }

    size: int
    top_k: int

    def __post_init__(self) -> None:
        check_whole("size", self.size)
        check_whole("top_k", self.top_k)

    @property
    def most_keys(self) -> int:
        """Keys that a query reads at most."""
        return self.size * self.top_k

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called: ``"MoBA"``."""

    @abstractmethod
    def memories(self, heads: AttentionConfig) -> tuple[Memory, ...]:
        """What a layer remembers for it, beside keys and values."""

    def parameter_groups(self, embed_dim: int, heads: AttentionConfig) -> Iterator[ParameterGroup]:
        """Its own parameters."""
        yield from ()

    @abstractmethod
    def choice_cost(self, heads: AttentionConfig) -> int:
        """Multiply-adds of a query with a key from which it may choose, all heads."""

    @abstractmethod
    def choices(self, heads: AttentionConfig) -> int:
        """Lists of blocks that a token makes: one for each head, or fewer."""

    @property
    def made_elements(self) -> int:
        """Elements per token that it makes of the layer's input at a time, at most."""
        return 0

    def check(self, heads: AttentionConfig) -> None:
        """Raises ConfigError where it cannot choose for these heads."""


def check_rotated(head_dim: int, heads: AttentionConfig) -> None:
    """Raises ConfigError where an indexer's heads have fewer features than these heads rotate."""
    if heads.rope is not None and head_dim < (heads.rope.dim or heads.head_dim):
        raise ConfigError(
            f"the indexer's head_dim must be at least {heads.rope.dim or heads.head_dim}, the "
            f"features that are rotated: got {head_dim}"
        )
