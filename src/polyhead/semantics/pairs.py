"""What a rule compares: values of queries and keys, for a tile of pairs at once or one pair alone.

A mask or a bias writes its rule once, over values that it asks of ``QueryKeyPairs``:

    q, k = of.q_position, of.k_position
    return lambda pair: q(pair) >= k(pair)

``Tile`` answers with tensors that broadcast to ``[B, H, T, S]``, and the rule draws a tile.
``ScalarPair`` answers with one number of each tensor, and the rule is a function that a compiler
fuses into a kernel (FlexAttention's ``mask_mod`` and ``score_mod``): batch row, head, query index
and key index come when it is called. Numbers of a rule are asked for too, so that another window is
another input and nothing to compile anew.

Shape letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyhead.semantics.tokens import Tokens

Pair = tuple[Tensor, ...]
"""Batch row, head, query index and key index of one pair; nothing for a tile."""
PairExpr = Callable[[Pair], Any]
"""A number of each pair."""


class QueryKeyPairs(ABC):
    """Pairs of these queries and keys.

    Args:
        q: Tokens of the queries.
        k: Tokens of the keys.
        device: Where values are to be.
        dtype: In which learned numbers are computed.
    """

    def __init__(
        self, q: Tokens, k: Tokens, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.q, self.k, self.device, self.dtype = q, k, device, dtype

    @property
    def q_position(self) -> PairExpr:
        return self._of_queries(self.q.position_tensor(self.device))

    @property
    def k_position(self) -> PairExpr:
        return self._of_keys(self.k.position_tensor(self.device))

    @property
    def q_place(self) -> PairExpr:
        return self._of_queries(self.q.place_tensor(self.device))

    @property
    def k_place(self) -> PairExpr:
        return self._of_keys(self.k.place_tensor(self.device))

    def per_token(
        self, number: Callable[[Tokens, torch.device], Tensor]
    ) -> tuple[PairExpr, PairExpr]:
        """A number of every token, ``[length]`` or ``[B, length]``: of the query, of the key."""
        return (
            self._of_queries(number(self.q, self.device)),
            self._of_keys(number(self.k, self.device)),
        )

    def per_head(self, numbers: Tensor) -> PairExpr:
        """A number of every head, ``[H]``."""
        return self.look_up(numbers.to(self.device, self.dtype)[None])

    def per_row(self, numbers: Tensor) -> PairExpr:
        """A number of every batch row, ``[1 or B]``."""
        return self.look_up(numbers.to(self.device)[:, None])

    @abstractmethod
    def number(self, number: int) -> PairExpr:
        """One number for all pairs."""

    @abstractmethod
    def of_pair(self, numbers: Tensor) -> PairExpr:
        """A number of every pair, ``[1 or B, 1 or H, 1 or T, 1 or S]`` by index in the call."""

    @abstractmethod
    def look_up(self, table: Tensor, *index: PairExpr) -> PairExpr:
        """The entry ``[batch row, head, *index]`` of a table ``[1 or B, 1 or H, …]``."""

    @abstractmethod
    def of_query(self, table: Tensor, column: PairExpr) -> PairExpr:
        """The entry ``[batch row, head, query, column]`` of ``[1 or B, 1 or H, T, n]``."""

    @abstractmethod
    def of_key(self, table: Tensor, column: PairExpr) -> PairExpr:
        """The entry ``[batch row, head, key, column]`` of ``[1 or B, 1 or H, S, n]``."""

    @abstractmethod
    def _of_queries(self, numbers: Tensor) -> PairExpr: ...

    @abstractmethod
    def _of_keys(self, numbers: Tensor) -> PairExpr: ...


class Tile(QueryKeyPairs):
    """All pairs of a run of queries and a run of keys."""

    def number(self, number: int) -> PairExpr:
        return lambda pair: number

    def of_pair(self, numbers: Tensor) -> PairExpr:
        numbers = cut(numbers, self.q, self.k).to(self.device)
        return lambda pair: numbers

    def look_up(self, table: Tensor, *index: PairExpr) -> PairExpr:
        if not index:
            return lambda pair: table[..., None, None]
        rows = torch.arange(table.shape[0], device=table.device).view(-1, 1, 1, 1)
        heads = torch.arange(table.shape[1], device=table.device).view(-1, 1, 1)
        return lambda pair: table[rows, heads, *(i(pair) for i in index)]

    def of_query(self, table: Tensor, column: PairExpr) -> PairExpr:
        rows = _run(table, self.q).to(self.device)
        return lambda pair: _gathered(rows, column(pair))

    def of_key(self, table: Tensor, column: PairExpr) -> PairExpr:
        rows = _run(table, self.k).to(self.device)
        return lambda pair: _gathered(rows, column(pair).mT).mT

    def _of_queries(self, numbers: Tensor) -> PairExpr:
        numbers = _per_row(numbers)[:, None, :, None]
        return lambda pair: numbers

    def _of_keys(self, numbers: Tensor) -> PairExpr:
        numbers = _per_row(numbers)[:, None, None, :]
        return lambda pair: numbers


class ScalarPair(QueryKeyPairs):
    """A single pair; all tokens are those of the whole call, so that an index is a column."""

    @property
    def q_position(self) -> PairExpr:
        return super().q_position if self.q.positions is not None else self.q_place

    @property
    def k_position(self) -> PairExpr:
        return super().k_position if self.k.positions is not None else self.k_place

    @property
    def q_place(self) -> PairExpr:
        return self._place(self.q, 2)

    @property
    def k_place(self) -> PairExpr:
        return self._place(self.k, 3)

    def _place(self, tokens: Tokens, axis: int) -> PairExpr:
        first = torch.tensor(tokens.places.low, device=self.device)
        if tokens.stride == 1:
            return lambda pair: pair[axis] + first
        stride = torch.tensor(tokens.stride, device=self.device)
        return lambda pair: pair[axis] * stride + first

    def number(self, number: int) -> PairExpr:
        held = torch.tensor(number, device=self.device)
        return lambda pair: held

    def of_pair(self, numbers: Tensor) -> PairExpr:
        numbers = numbers.to(self.device)
        return lambda pair: _entry(numbers, *pair)

    def look_up(self, table: Tensor, *index: PairExpr) -> PairExpr:
        return lambda pair: _entry(table, pair[0], pair[1], *(i(pair) for i in index))

    def of_query(self, table: Tensor, column: PairExpr) -> PairExpr:
        table = table.to(self.device)
        return lambda pair: _entry(table, *pair[:3], column(pair))

    def of_key(self, table: Tensor, column: PairExpr) -> PairExpr:
        table = table.to(self.device)
        return lambda pair: _entry(table, *pair[:2], pair[3], column(pair))

    def _of_queries(self, numbers: Tensor) -> PairExpr:
        numbers = _per_row(numbers)
        return lambda pair: _entry(numbers, pair[0], pair[2])

    def _of_keys(self, numbers: Tensor) -> PairExpr:
        numbers = _per_row(numbers)
        return lambda pair: _entry(numbers, pair[0], pair[3])


def cut(tensor: Tensor, q: Tokens, k: Tokens) -> Tensor:
    """The tile of a 4-D tensor that broadcasts to ``[B, H, T, S]``."""
    if tensor.shape[-2] != 1:
        tensor = tensor[:, :, q.start : q.start + q.length]
    if tensor.shape[-1] != 1:
        tensor = tensor[..., k.start : k.start + k.length]
    return tensor


def _run(table: Tensor, tokens: Tokens) -> Tensor:
    """The rows of these tokens, of ``[B, H, tokens, n]``."""
    return table[:, :, tokens.start : tokens.start + tokens.length]


def _gathered(rows: Tensor, columns: Tensor) -> Tensor:
    """``[B, H, T, S]`` entries of ``[1 or B, 1 or H, T, n]`` at columns ``[1 or B, 1, T, S]``."""
    B, (_, H, T, n) = max(len(rows), len(columns)), rows.shape
    return rows.expand(B, H, T, n).gather(-1, columns.expand(B, H, T, -1))


def _per_row(numbers: Tensor) -> Tensor:
    """``[length]`` or ``[B, length]`` as ``[1 or B, length]``."""
    return numbers[None] if numbers.ndim == 1 else numbers


def _entry(table: Tensor, *index: Tensor) -> Tensor:
    """An entry of a table whose sides of length 1 stand for every index."""
    sides = zip(index, table.shape, strict=True)
    return table[tuple(i if side > 1 else torch.zeros_like(i) for i, side in sides)]
