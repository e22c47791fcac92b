"""Which tokens of a sequence each rank holds.

    contiguous   0 0 0 0 1 1 1 1     one run of neighbours for each rank
    zigzag       0 0 1 1 1 1 0 0     2 N runs, the first and the last for rank 0 (Zhu 2024)
    striped      0 1 0 1 0 1 0 1     every N-th token (Brandon et al. 2023)

Under a causal mask late tokens see more keys than early ones: zigzag and striped give every rank
as many visible pairs, contiguous gives the last rank most. Lengths need not divide.

Shape letters: B batch, T tokens of a whole sequence, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from polyhead.semantics.tokens import Tokens

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS: tuple[Order, ...] = get_args(Order)


class TokenSpan(NamedTuple):
    """Tokens of a sequence at equal distances: ``first``, ``first + stride``, …"""

    first: int
    length: int
    stride: int = 1

    @property
    def whole(self) -> slice:
        """These tokens in a tensor of the whole sequence."""
        return slice(self.first, self.first + self.stride * self.length, self.stride)


class LocalSpan(NamedTuple):
    """A run as a rank holds it.

    Attributes:
        rows: The run in the rank's own tensors.
        run: The run in the sequence.
        tokens: Its positions and places.
    """

    rows: slice
    run: TokenSpan
    tokens: Tokens


@dataclass(frozen=True, eq=False)
class Spread:
    """The tokens of one axis over ranks.

    Attributes:
        order: Which rank holds which tokens.
        total: T, of all ranks.
        ranks: Number of ranks N.
        positions: ``[T]`` or ``[B, T]`` in the order of the sequence; None: positions are places.
        shift: Added to places; in an attention of T queries to S keys queries have S − T.
    """

    order: Order
    total: int
    ranks: int
    positions: Tensor | None = None
    shift: int = 0

    def __post_init__(self) -> None:
        least = self.ranks * (2 if self.order == "zigzag" and self.ranks > 1 else 1)
        if self.total < least:
            raise ValueError(
                f"a sequence over {self.ranks} ranks in {self.order} order needs at least {least} "
                f"tokens: got {self.total}"
            )

    def spans(self, rank: int) -> tuple[TokenSpan, ...]:
        """The runs of a rank, in the order of its own tensors; none is empty."""
        total, ranks = self.total, self.ranks
        if self.order == "striped":
            return (TokenSpan(rank, len(range(rank, total, ranks)), ranks),)
        pieces = ranks if self.order == "contiguous" or ranks == 1 else 2 * ranks
        numbers = (rank,) if pieces == ranks else (rank, pieces - 1 - rank)
        ends = [(total * n // pieces, total * (n + 1) // pieces) for n in numbers]
        return tuple(TokenSpan(first, stop - first) for first, stop in ends if stop > first)

    def length(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(run.length for run in self.spans(rank))

    @cached_property
    def longest(self) -> int:
        """Tokens of the rank that holds most."""
        return max(self.length(rank) for rank in range(self.ranks))

    def held(self, rank: int, most: int | None = None) -> Iterator[LocalSpan]:
        """The runs of a rank with their tokens, in pieces of at most ``most``."""
        return self._held(self.spans(rank), most)

    def all_held(self, most: int) -> Iterator[LocalSpan]:
        """All tokens in the order of the sequence, in pieces of at most ``most``."""
        return self._held((TokenSpan(0, self.total),), most)

    def _held(self, spans: tuple[TokenSpan, ...], most: int | None) -> Iterator[LocalSpan]:
        start = 0
        for run in spans:
            for at in range(0, run.length, most or run.length):
                length = min(most or run.length, run.length - at)
                part = TokenSpan(run.first + at * run.stride, length, run.stride)
                yield LocalSpan(slice(start, start + length), part, self.tokens_of(part))
                start += length

    def whole(self) -> LocalSpan:
        """All tokens in the order of the sequence."""
        run = TokenSpan(0, self.total)
        return LocalSpan(slice(0, self.total), run, self.tokens_of(run))

    def tokens_of(self, run: TokenSpan) -> Tokens:
        """Positions and places of a run."""
        positions = None if self.positions is None else self.positions[..., run.whole]
        shift = run.first + self.shift
        return Tokens.of(run.length, shift=shift, positions=positions, stride=run.stride)

    def indexes(self, rank: int, device: torch.device | None = None) -> Tensor:
        """``[tokens of the rank]``: where its tokens stand in the sequence."""
        spans = [
            torch.arange(run.first, run.whole.stop, run.stride, device=device)
            for run in self.spans(rank)
        ]
        return torch.cat(spans)

    def taken(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The tokens of a rank from a tensor of the whole sequence."""
        return x.index_select(dim, self.indexes(rank, x.device))

    def joined(self, parts: list[Tensor], dim: int) -> Tensor:
        """The whole sequence from the tokens of all ranks; differentiable."""
        if self.order != "striped":  # runs of neighbours, which are copied once
            spans = [
                (held.run.first, part.narrow(dim, held.rows.start, held.run.length))
                for rank, part in enumerate(parts)
                for held in self.held(rank)
            ]
            return torch.cat([part for _, part in sorted(spans, key=lambda run: run[0])], dim)
        order = torch.cat([self.indexes(rank) for rank in range(self.ranks)]).argsort()
        return torch.cat(parts, dim).index_select(dim, order.to(parts[0].device))


def visible_pairs(spread: Spread, rank: int) -> int:
    """Pairs of a query of ``rank`` and a key of any rank that causal order leaves visible."""
    return int((spread.indexes(rank) + 1).sum())
