"""Parameters as data: how many, of which part, how ranks share them.

A piece is ``units × size`` parameters. Tensor parallelism shares the units among the ranks (query
heads, kv heads, hidden features, rows of the vocabulary); one unit is on every rank. A kv head
is copied where there are more ranks than kv heads, and the latent projections of MLA always are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelPart = Literal["embedding", "attention", "feed_forward", "norms", "head"]


@dataclass(frozen=True)
class ParameterGroup:
    """Some parameters.

    Attributes:
        part: As in ``ParameterCounts``.
        units: What ranks share among them.
        size: Parameters of a unit.
        multiplied: Whether each parameter takes part in one multiply-add per token.
        experts: How many experts these are of (1: none), and
        visited: how many of them a token visits.
        looked_up: Whether a token reads one row of it alone.
        as_numbers: Whether it is never kept in codes: not only products read it.
        held: Whether it is this layer's: False where it multiplies by an earlier layer's.
    """

    part: ModelPart
    units: int
    size: int
    multiplied: bool = True
    experts: int = 1
    visited: int = 1
    looked_up: bool = False
    as_numbers: bool = False
    held: bool = True

    @property
    def count(self) -> int:
        return self.units * self.size

    @property
    def active(self) -> int:
        """Parameters that are used for one token."""
        return self.count * self.visited // self.experts

    def on_rank(self, ranks: int) -> int:
        """Most parameters on one rank."""
        return -(-self.units // ranks) * self.size

    def touched(self, ranks: int, batch_size: int) -> float:
        """Parameters that a decode step of ``batch_size`` tokens reads on a rank.

        Tokens are assumed to choose experts evenly and independently: of n experts, b tokens that
        visit k each use n · (1 − (1 − k/n)^b) on average.
        """
        if self.looked_up:
            return batch_size * self.on_rank(ranks) / self.units
        unseen = (1 - self.visited / self.experts) ** batch_size
        return self.on_rank(ranks) * (1 - unseen)
