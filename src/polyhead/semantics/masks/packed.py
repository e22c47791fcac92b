"""Masks that count places, the slots of a sequence: right padding and packed documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.semantics.masks.algebra import Mask, Range, Visibility
from polyhead.semantics.masks.counts import PerRow, below, short
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs
from polyhead.semantics.tokens import Span, Tokens

_NEVER = torch.iinfo(torch.int64).max
"""The end of documents that a row does not have."""


class KeyLengths(Mask, arguments={"length": Tensor | list}):
    """Only the first ``length`` keys of a batch row are real; the rest is padding on the right.

    Counts places, not positions: padding is about slots in memory.
    """

    compares = "places"

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        self.length = PerRow("KeyLengths length", length)

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        k, length = of.k_place, of.per_row(self.length.tensor(of.device))
        return lambda pair: k(pair) < length(pair)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return below(k.places, self.length.span)

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range | None:
        if k.positions is not None:  # lengths count places
            return None
        return Range(None, self.length.tensor(device)[:, None].expand(-1, q.length))

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.length.check(batch)
        if self.length.span is not None and self.length.span.high > keys:
            raise ValueError(
                f"KeyLengths length must be at most the number of keys, S = {keys}: got "
                f"{self.length.span.high}"
            )

    def made_for(self) -> tuple[int, int] | None:
        most = 0 if self.length.span is None else self.length.span.high
        return (most, most) if most > 0 else None

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return KeyLengths(self.length.of_rows(rows))

    def __repr__(self) -> str:
        return f"KeyLengths({self.length})"


class Documents(Mask, arguments={"lengths": list}):
    """Packed documents: a query sees the keys of its own document.

    Args:
        lengths: Tokens per document in the order of packing, one list for all batch rows or a list
            per row. They count places and must add up to the number of keys.

    Raises:
        ValueError: No documents, a length below 0, or (in a call) a sum that is not S.
    """

    compares = "places"

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        rows = lengths.tolist() if isinstance(lengths, Tensor) else [*lengths]
        if not rows:
            raise ValueError("Documents needs at least one length: got none")
        nested = isinstance(rows[0], Sequence)
        self.lengths: list[list[int]] = [
            [check_int("a Documents length", n, least=0) for n in row]
            for row in (rows if nested else [rows])
        ]
        self._ends = [list(accumulate(row)) for row in self.lengths]

    def positions(self) -> Tensor:
        """``[S]`` or ``[B, S]``: every document counts its own positions from 0.

        With rotary or learned positions, packed documents need these to equal separate runs."""
        rows = [torch.cat([torch.arange(n, device="cpu") for n in row]) for row in self.lengths]
        return rows[0] if len(rows) == 1 else torch.stack(rows)

    def ids(self, tokens: Tokens, device: torch.device) -> Tensor:
        """``[1 or B, length]``: the number of the document that each token stands in."""
        places = tokens.place_tensor(device).expand(len(self._ends), -1).contiguous()
        return torch.searchsorted(self._end_table(device), places, right=True)

    def made_for(self) -> tuple[int, int] | None:
        total = sum(self.lengths[0])
        return (total, total) if total else None

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        q, k = of.per_token(self.ids)
        return lambda pair: q(pair) == k(pair)

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range | None:
        if k.positions is not None:  # lengths count places
            return None
        ends, ids = self._end_table(device), self.ids(q, device)
        starts = torch.nn.functional.pad(ends, (1, 0))
        # A query beyond the last document sees the keys beyond it: there are none.
        ends = torch.cat((ends, torch.full_like(ends[:, :1], _NEVER)), dim=1)
        return Range(starts.gather(1, ids), ends.gather(1, ids))

    def _end_table(self, device: torch.device) -> Tensor:
        """``[1 or B, documents]`` where each document ends; rows with fewer go on with ∞."""
        widest = max(map(len, self._ends))
        rows = [[*row, *[_NEVER] * (widest - len(row))] for row in self._ends]
        return torch.tensor(rows, device=device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        kinds = {self._classify_row(ends, q.places, k.places) for ends in self._ends}
        return kinds.pop() if len(kinds) == 1 else Visibility.SOME

    @staticmethod
    def _classify_row(ends: list[int], q: Span, k: Span) -> Visibility:
        q_first, q_last = _document_at(ends, q.low), _document_at(ends, q.high)
        k_first, k_last = _document_at(ends, k.low), _document_at(ends, k.high)
        if q_last < k_first or k_last < q_first:
            return Visibility.NONE
        return Visibility.ALL if q_first == q_last == k_first == k_last else Visibility.SOME

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if 1 != len(self.lengths) != batch:
            raise ValueError(
                f"Documents lists {len(self.lengths)} batch rows, the call has batch {batch}"
            )
        for row, ends in enumerate(self._ends):
            if ends[-1] != keys:
                raise ValueError(
                    f"Documents lengths must add up to the number of keys: row {row} adds up to "
                    f"{ends[-1]}, there are {keys} keys"
                )

    def of_rows(self, rows: Sequence[int]) -> Mask:
        if len(self.lengths) == 1:
            return self
        return Documents([self.lengths[row] for row in rows])

    def __repr__(self) -> str:
        rows = [short(row) for row in self.lengths]
        return f"Documents({rows[0] if len(rows) == 1 else '[' + ', '.join(rows) + ']'})"


def _document_at(ends: list[int], place: int) -> int:
    """The number of the document that holds a place, from the ends of all."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace bisect
        return sum(end <= place for end in ends)
    return bisect_right(ends, place)
