"""What a corpus is: pairs of texts to learn from, and others to be tested by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pair:
    """A text, what is to be written for it, and where both come from, for messages."""

    source: str
    target: str
    where: str


@dataclass(frozen=True)
class Corpus:
    """Pairs.

    Attributes:
        baselines: Names to functions that need no training, to compare with.
    """

    training: Sequence[Pair]
    held_out: Sequence[Pair]
    baselines: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
