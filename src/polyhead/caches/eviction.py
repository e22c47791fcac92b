"""Layouts that evict keys: what is forgotten is lost.

``H2O`` and ``SnapKV`` go by the weights that attention gave keys, and each kv head chooses for
itself. A key's weights are exact, p_ij = exp(score_ij − lse_i), over the keys that are still held,
and are added up over the query heads that share the kv head. ``StreamingLLM`` goes by position.

Shape letters: B batch, G kv heads, S keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._utils.checks import check_int, check_one_of
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class Evicting(ABC):
    """At most ``budget`` keys and values of each kv head stay when keys are evicted: lossy.

    Attributes:
        budget: How many, the most recent ones included.
    """

    accumulates: ClassVar[bool]
    """Whether weights of all queries are added up, a number for each key; else of the last ones."""
    by_weight: ClassVar[bool] = True
    """Whether heads choose, each for itself; else all hold the same tokens, and keys are rotated,
    and biases counted, by places in the cache."""
    budget: int

    @property
    @abstractmethod
    def last_tokens(self) -> int:
        """The most recent tokens, which always stay."""

    @property
    def last_queries(self) -> int | None:
        """Queries of a call whose weights count; None: all."""
        return None if self.accumulates else self.last_tokens

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a row never holds more of; None: what is generated comes on top."""
        return self.budget if self.accumulates else None

    def evicts(self, held: Sequence[int], new: Sequence[int]) -> list[bool]:
        """Whether each row, which holds some tokens and gets new ones, evicts after them."""
        least = self.last_queries or 1
        pairs = zip(held, new, strict=True)
        return [more >= least and have + more > self.budget for have, more in pairs]

    def ranked(self, weights: Tensor, positions: Tensor, older: Tensor) -> Tensor:
        """``[B, G, S]``: the keys that rank highest stay beside the most recent ones.

        Args:
            weights: ``[B, G, S]``, those of the queries that count.
            positions: ``[B, G, S]`` of the keys.
            older: ``[B, G, S]`` bool, keys that are not among the most recent ones.
        """
        return weights


@dataclass(frozen=True)
class H2O(Evicting):
    """Heavy hitters and the most recent tokens: never more than ``budget`` (Zhang et al. 2023).

    After every call the ``recent`` last tokens stay, and of the others those whose weights, added
    up over all queries so far, are largest (arXiv 2306.14048). For the paper's algorithm every
    token is a call; a prompt in one call is read whole before anything is evicted, so results
    depend on how it is cut. Keys keep the rotation of their own positions.

    Attributes:
        budget: Keys of each kv head.
        recent: Last tokens among them; default half, as in its authors' code.
    """

    accumulates: ClassVar[bool] = True
    recent: int | None = None

    def __post_init__(self) -> None:
        check_int("budget", self.budget, least=1, error=ConfigError)
        if self.recent is None:
            object.__setattr__(self, "recent", max(1, self.budget // 2))
        check_int("recent", self.recent, least=1, most=self.budget, error=ConfigError)

    @property
    def last_tokens(self) -> int:
        return self.recent or 1


@dataclass(frozen=True)
class SnapKV(Evicting):
    """A prompt's keys, chosen by what its last ``window`` queries look at (Li et al. 2024).

    After a call of at least ``window`` tokens of a row, its last ``window`` tokens stay, and of the
    others those with the largest weights, added up over these queries and pooled over ``kernel``
    neighbours (arXiv 2404.14469; here the query heads of a group vote together, so that keys are
    not repeated). Shorter calls, such as decoding steps, evict nothing: what is generated comes on
    top of the budget.

    Attributes:
        budget: Keys of each kv head that stay of a prompt.
        window: Observation window: last queries, and last tokens that stay.
        kernel: Neighbours that are pooled, an odd number.
        pooling: ``"max"`` or ``"average"``.
    """

    accumulates: ClassVar[bool] = False
    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "average"] = "max"

    def __post_init__(self) -> None:
        check_int("window", self.window, least=1, error=ConfigError)
        check_int("budget", self.budget, least=self.window + 1, error=ConfigError)
        check_int("kernel", self.kernel, least=1, error=ConfigError)
        if self.kernel % 2 == 0:
            raise ConfigError(f"kernel must be odd, as many before a key as behind: {self.kernel}")
        check_one_of("pooling", self.pooling, ("max", "average"), error=ConfigError)

    @property
    def last_tokens(self) -> int:
        return self.window

    def ranked(self, weights: Tensor, positions: Tensor, older: Tensor) -> Tensor:
        order = positions.masked_fill(~older, torch.iinfo(positions.dtype).max).argsort(dim=-1)
        highest = self.pooling == "max"
        row = weights.masked_fill(~older, -torch.inf if highest else 0.0).gather(-1, order)
        pool = F.max_pool1d if highest else F.avg_pool1d
        pooled = pool(row, self.kernel, 1, self.kernel // 2)
        return torch.empty_like(weights).scatter_(-1, order, pooled)


@dataclass(frozen=True)
class StreamingLLM(Evicting):
    """The first ``sinks`` tokens and the most recent ones, for endless texts (Xiao et al. 2023).

    After every call the first tokens, which draw much weight whatever they say, and the last
    ``budget`` − ``sinks`` stay (arXiv 2309.17453). Positions are places in the cache (§3.2): keys
    are held before rotary embedding and rotated when they are read, so that no distance exceeds
    the budget and the tokens of a call, however long the text grows. A prompt in one call is read
    whole before anything is evicted.

    Attributes:
        budget: Keys of each kv head, the first ones included.
        sinks: First tokens that stay; 4 in the paper.
    """

    accumulates: ClassVar[bool] = False
    by_weight: ClassVar[bool] = False
    sinks: int = 4

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, least=0, error=ConfigError)
        check_int("budget", self.budget, least=self.sinks + 1, error=ConfigError)

    @property
    def last_tokens(self) -> int:
        return self.budget - self.sinks

    @property
    def last_queries(self) -> int | None:
        return None

    @property
    def most_tokens(self) -> int | None:
        return self.budget

    def ranked(self, weights: Tensor, positions: Tensor, older: Tensor) -> Tensor:
        return -positions.to(weights.dtype)
