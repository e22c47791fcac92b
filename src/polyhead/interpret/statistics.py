"""What statistics of attention there are: the one place that states name, unit and needs of each.

``measuring.py`` computes them, ``AttentionView`` returns them, ``HeadSummary`` has their means.
Pages say them in words: the texts ``stat.NAME``, ``stat.NAME.help`` and ``unit.UNIT``.

Letters: B batch, H query heads, T queries, S keys, k weights per row, N documents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, overload

from torch import Tensor

from polyhead.errors import InputError


@dataclass
class Statistic:
    """One statistic; an attribute of each class of ``Statistics``.

    Attributes:
        unit: What it is counted in: ``"nats"``, ``"keys"``, ``"tokens"``, ``"share"`` from 0 to 1,
            or ``"key"``, the index of one (int64, −1 for none).
        needs: ``"weights"`` alone, ``"positions"`` that queries and keys share, the ``"tokens"`` or
            the ``"documents"``.
        shape: A letter for each dimension.
        averaged: Whether ``HeadSummary`` and pages have its mean over queries.
        native: The sum of ``native.TileSums`` that compiled code makes of it; statistics with the
            same sum are made together. Empty: torch makes it.
        name: Name of the class attribute.
    """

    unit: str
    needs: str = "weights"
    shape: str = "BHT"
    averaged: bool = False
    native: str = ""
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, of: None, owner: type) -> Self: ...
    @overload
    def __get__(self, of: Statistics, owner: type) -> Tensor: ...
    def __get__(self, of: Statistics | None, owner: type) -> Self | Tensor:
        return self if of is None else of.statistic(self.name)

    @property
    def one_sequence(self) -> bool:
        """Whether queries and keys must be of one sequence, as those of cross-attention are not."""
        return self.needs in ("positions", "tokens")


class Statistics(ABC):
    """All statistics as attributes, in the order in which they are shown.

    Of a query that sees nothing they are 0. float32, or float64 for float64.
    """

    entropy = Statistic("nats", averaged=True, native="entropy")
    """−Σ p log p of each row: 0 (one key) to ln S (all alike). A sink is one more key."""

    effective_keys = Statistic("keys", averaged=True, native="squares")
    """1 / Σ p²: how many keys of equal weight have this Σ p² (Hill 1973, order 2)."""

    first_token = Statistic("share", averaged=True)
    """Weight on the token at position 0."""

    previous_token = Statistic("share", "positions", averaged=True)
    """Weight on the token one position before the query."""

    self = Statistic("share", "positions", averaged=True)
    """Weight on the query's own position."""

    max_weight = Statistic("share", averaged=True, native="largest")
    """Largest weight of each row."""

    max_key = Statistic("key", native="largest")
    """Index of the key with the largest weight; −1 where nothing is seen."""

    mean_distance = Statistic("tokens", "positions", averaged=True)
    """Σ p |query position − key position|."""

    duplicate = Statistic("share", "tokens", averaged=True)
    """Weight on earlier copies of the query's token."""

    induction = Statistic("share", "tokens", averaged=True)
    """Weight on the tokens that followed earlier copies of the query's token (the prefix matching
    score of Olsson et al. 2022)."""

    top_weights = Statistic("share", shape="BHTk", native="top")
    """The k largest weights of each row, in order; fewer than k where there are fewer keys."""

    top_keys = Statistic("key", shape="BHTk", native="top")
    """Indexes of the keys of ``top_weights``; −1 for a weight of 0."""

    document_mass = Statistic("share", "documents", shape="BHTN")
    """Weight on each document."""

    received = Statistic("share", shape="BHS", native="received")
    """Weight that each key receives from all queries."""

    @abstractmethod
    def statistic(self, name: str) -> Tensor:
        """A statistic by its name."""


TABLE: Mapping[str, Statistic] = {
    name: each for name, each in vars(Statistics).items() if isinstance(each, Statistic)
}
"""All statistics by name, in the order in which they are shown."""

AVERAGED = tuple(name for name, each in TABLE.items() if each.averaged)
"""Names of statistics with one number per head, the mean over queries."""

OF_TOKENS = tuple(name for name, each in TABLE.items() if each.needs == "tokens")
"""One number per row that needs the token ids."""

OF_ROWS = tuple(
    name for name, each in TABLE.items() if each.shape == "BHT" and each.needs != "tokens"
)
"""One number per row that needs nothing but weights and positions."""


class HeadSummary(Statistics):
    """One number per head, ``[H]``: means over the queries that see something.

    The first query of each batch row is left out where there are others: with a causal mask it
    sees only itself, whatever the head does. NaN where no query is left.

    Attributes:
        means: By name. ``duplicate`` and ``induction`` are missing where the tokens are not known.
    """

    def __init__(self, means: Mapping[str, Tensor]) -> None:
        self.means = means

    def statistic(self, name: str) -> Tensor:
        if name not in self.means:
            raise InputError(f"this summary has no {name}: it has {', '.join(self.means)}")
        return self.means[name]
