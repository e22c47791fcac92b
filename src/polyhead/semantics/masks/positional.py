"""Masks that compare absolute positions: causal order, a window, chunks, a prefix seen by all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.semantics.masks.algebra import Mask, Range, Visibility
from polyhead.semantics.masks.counts import PerRow, below
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs
from polyhead.semantics.tokens import Tokens


class Causal(Mask, arguments={}):
    """A query sees keys at its own position and before: key position ≤ query position."""

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        q, k = of.q_position, of.k_position
        return lambda pair: q(pair) >= k(pair)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if q.span is None or k.span is None:
            return Visibility.SOME
        if k.span.low > q.span.high:
            return Visibility.NONE
        return Visibility.ALL if k.span.high <= q.span.low else Visibility.SOME

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        return Range(None, _at_rows(q, device) + 1)

    def is_causal(self) -> bool:
        return True

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return self

    def __repr__(self) -> str:
        return "Causal()"


class Window(Mask, arguments={"size": int, "ahead": int | None}):
    """A query sees keys less than ``size`` positions back: query − key < size.

    With ``Causal()`` those are ``size`` keys including the query itself, the sense of Hugging
    Face's ``sliding_window`` (FlashAttention's ``window_size[0]`` is one less). ``ahead`` limits
    the other side of a mask that is not causal: key − query ≤ ahead.

    Raises:
        ValueError: ``size`` below 1 or ``ahead`` below 0.
    """

    def __init__(self, size: int, ahead: int | None = None) -> None:
        self.size = check_int("Window size", size, least=1)
        self.ahead = None if ahead is None else check_int("Window ahead", ahead, least=0)

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        q, k, size = of.q_position, of.k_position, of.number(self.size)
        if self.ahead is None:
            return lambda pair: k(pair) > q(pair) - size(pair)
        ahead = of.number(self.ahead)
        return lambda pair: (k(pair) > q(pair) - size(pair)) & (k(pair) <= q(pair) + ahead(pair))

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if q.span is None or k.span is None:
            return Visibility.SOME
        nearest, farthest = q.span.low - k.span.high, q.span.high - k.span.low
        if nearest >= self.size or (self.ahead is not None and farthest < -self.ahead):
            return Visibility.NONE
        inside = farthest < self.size and (self.ahead is None or nearest >= -self.ahead)
        return Visibility.ALL if inside else Visibility.SOME

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        at = _at_rows(q, device)
        return Range(at - self.size + 1, None if self.ahead is None else at + self.ahead + 1)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return self

    def __repr__(self) -> str:
        return f"Window({self.size}{'' if self.ahead is None else f', ahead={self.ahead}'})"


class Chunk(Mask, arguments={"size": int, "before": int}):
    """Positions are cut into runs of ``size``; a query sees the keys of its own run (Llama 4).

    ``before``: and those of so many runs before it (Reformer).
    """

    def __init__(self, size: int, before: int = 0) -> None:
        self.size = check_int("Chunk size", size, least=1)
        self.before = check_int("Chunk before", before, least=0)

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        q, k, size = of.q_position, of.k_position, of.number(self.size)
        before = of.number(self.before)
        return lambda pair: _within(q(pair) // size(pair) - k(pair) // size(pair), before(pair))

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if q.span is None or k.span is None:
            return Visibility.SOME
        q_low, q_high = q.span.low // self.size, q.span.high // self.size
        k_low, k_high = k.span.low // self.size, k.span.high // self.size
        if q_high < k_low or k_high < q_low - self.before:
            return Visibility.NONE
        inside = k_low >= q_high - self.before and k_high <= q_low
        return Visibility.ALL if inside else Visibility.SOME

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        first = _at_rows(q, device) // self.size * self.size
        return Range(first - self.before * self.size, first + self.size)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return self

    def __repr__(self) -> str:
        return f"Chunk({self.size}, {self.before})" if self.before else f"Chunk({self.size})"


class Prefix(Mask, arguments={"length": Tensor | list}):
    """Every query sees the keys at positions below ``length`` (one number, or one per row)."""

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        self.length = PerRow("Prefix length", length)

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        k, length = of.k_position, of.per_row(self.length.tensor(of.device))
        return lambda pair: k(pair) < length(pair)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return below(k.span, self.length.span)

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        return Range(None, self.length.tensor(device)[:, None].expand(-1, q.length))

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.length.check(batch)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return Prefix(self.length.of_rows(rows))

    def __repr__(self) -> str:
        return f"Prefix({self.length})"


def _within(apart: Tensor, most: Tensor) -> Tensor:
    return (apart >= 0) & (apart <= most)


def _at_rows(q: Tokens, device: torch.device) -> Tensor:
    """Query positions, ``[1 or B, T]``."""
    positions = q.position_tensor(device)
    return positions[None] if positions.ndim == 1 else positions
