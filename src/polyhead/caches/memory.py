"""Where units lie: in rows that grow or wrap around, or in pages that sequences share.

A *unit* is one token, or one group of quantized tokens; ``sizes.Store`` says what tensors it has.
Every batch row counts its own units from 0, and writes follow on from its last. Only this file
knows the addresses of units: others ask for ``spans`` of addresses and ``read`` them.

    rows    address = unit, or unit mod limit once the store is full (a ring)
    pages   address = unit; table[row][unit // page] is the page, see ``pages.py``

Shape letters: B batch, n units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from polyhead.caches.sizes import SCALE_DTYPE, Store


class Span(NamedTuple):
    """Units ``first`` to ``first + length`` of every row at addresses from ``address`` on."""

    first: int
    address: int
    length: int


class Memory(ABC):
    """The tensors of one store.

    Attributes:
        store: What they are.
        stops: Units ever written minus those taken back, per batch row. Not changed in place: the
            list of a memory that holds other tokens is another one (``together.py``).
        firsts: The oldest unit still held, per batch row.
        tensors: One per field.
    """

    store: Store
    device: torch.device
    stops: list[int]
    firsts: list[int]
    tensors: list[Tensor]
    in_place: bool
    """Whether ``read`` returns views."""

    @abstractmethod
    def reserve(self, units: int) -> None:
        """Makes room for ``units`` units in every row."""

    def write(self, rows: Sequence[int] | None, records: Sequence[Tensor]) -> None:
        """Appends units to some rows.

        Args:
            rows: Batch rows that stand at the same unit; None: all of them.
            records: ``[rows, heads, n, width]`` per field.
        """
        self.put(rows, self.stops[0 if rows is None else rows[0]], records)
        self.count(rows, records[0].shape[2])

    @abstractmethod
    def put(self, rows: Sequence[int] | None, start: int, records: Sequence[Tensor]) -> None:
        """Makes room for units from ``start`` on and writes them; counts nothing."""

    def count(self, rows: Sequence[int] | None, units: int | Sequence[int]) -> None:
        """Counts units that ``put``, or the caller, writes; in each of the rows, or of each."""
        stops, limit = [*self.stops], self.store.limit
        touched = range(len(stops)) if rows is None else rows
        for row, more in zip(touched, _each(units, len(touched)), strict=True):
            stops[row] += more
        if limit is not None:
            firsts = [*self.firsts]
            for row in touched:
                firsts[row] = max(firsts[row], stops[row] - limit)
            self.firsts = firsts
        self.stops = stops

    @abstractmethod
    def read(self, start: int, stop: int, only: int | None = None) -> list[Tensor]:
        """``[B, heads, n, width]`` per field, or of one, at addresses ``start`` to ``stop``."""

    @abstractmethod
    def spans(self, first: int, stop: int) -> list[Span]:
        """Where units ``first`` to ``stop`` lie, for rows that stand at the same unit."""

    @abstractmethod
    def restore(
        self, records: Sequence[Tensor], stops: Sequence[int], firsts: Sequence[int]
    ) -> None:
        """Takes over what another memory's ``read`` of all addresses gave; this one is empty."""

    @abstractmethod
    def add_positions(self, store: Store, base: int) -> None:
        """One more tensor: the positions of the tokens of each unit, counted from ``base`` so far.

        Args:
            store: The store with its new field.
            base: Place of the first token of unit 0.
        """

    @abstractmethod
    def fork(self) -> Self:
        """Another memory with the same content."""

    @abstractmethod
    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row ``rows[i]`` was; there may be more or fewer rows than before."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Units that every row has room for now."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that the units held take."""

    def cut(self, row: int, stop: int) -> None:
        """Takes back the units from ``stop`` on."""
        self.stops = with_one(self.stops, row, stop)
        self.firsts = with_one(self.firsts, row, min(self.firsts[row], stop))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def units(self, start: int, stop: int) -> Tensor:
        """``[B, stop − start]`` the unit at each address of each row; −1 where there is none."""
        address = torch.arange(start, stop, device="cpu")
        stops, firsts = (
            torch.tensor(self.stops, device="cpu")[:, None],
            torch.tensor(self.firsts, device="cpu")[:, None],
        )
        unit = address.expand(len(self.stops), -1)
        if self.store.limit is not None:
            unit = unit + (stops - 1 - unit).div(self.store.limit, rounding_mode="floor").mul(
                self.store.limit
            )
        return unit.where((unit >= firsts) & (unit < stops), -1)

    @property
    def extent(self) -> int:
        """Addresses in use by any row."""
        stop = max(self.stops, default=0)
        return stop if self.store.limit is None else min(stop, self.store.limit)


class Rows(Memory):
    """``[B, heads, capacity, width]`` per field: in order, or a ring if the store has a limit."""

    in_place = True

    def __init__(self, store: Store, batch: int, device: torch.device) -> None:
        self.store, self.device = store, device
        self.stops, self.firsts = [0] * batch, [0] * batch
        self.tensors = [
            empty((batch, field.heads, 0, field.width), field.dtype, device)
            for field in store.fields
        ]

    @property
    def capacity(self) -> int:
        # Only the smallest: with gradients, tensors are exactly as long as what they hold.
        return min([tensor.shape[2] for tensor in self.tensors])

    @property
    def used_bytes(self) -> int:
        held = sum(stop - first for stop, first in zip(self.stops, self.firsts, strict=True))
        return held * self.store.unit_bytes

    def reserve(self, units: int) -> None:
        wanted = self.store.capacity(units, self.capacity)
        for i, old in enumerate(self.tensors):
            if old.shape[2] < wanted:
                # Field by field, so that only one old tensor exists beside the new one.
                # A ring that still grows has never wrapped.
                new = empty((*old.shape[:2], wanted, old.shape[3]), old.dtype, self.device)
                with torch.no_grad():
                    new[:, :, : old.shape[2]] = old
                    clear_scales(self.store, new[:, :, old.shape[2] :])
                self.tensors[i] = new
            del old

    def put(self, rows: Sequence[int] | None, start: int, records: Sequence[Tensor]) -> None:
        count, limit = records[0].shape[2], self.store.limit
        if torch.is_grad_enabled() and any(
            t.requires_grad for pair in zip(self.tensors, records, strict=True) for t in pair
        ):
            self._join(start, records)
            return
        if start + count > self.capacity:
            self.reserve(start + count)
        skipped = 0 if limit is None else max(0, count - limit)
        for span in self.spans(start + skipped, start + count):
            for tensor, record in zip(self.tensors, records, strict=True):
                if span.length < count:
                    record = record.narrow(2, span.first - start, span.length)
                if rows is None:
                    tensor.narrow(2, span.address, span.length).copy_(record)
                    continue
                for i, row in enumerate(rows):
                    tensor[row].narrow(1, span.address, span.length).copy_(record[i])

    def _join(self, start: int, records: Sequence[Tensor]) -> None:
        """New tensors, so that gradients flow to everything that is held."""
        for i, record in enumerate(records):
            self.tensors[i] = torch.cat((self.tensors[i][:, :, :start], record), dim=2)

    def read(self, start: int, stop: int, only: int | None = None) -> list[Tensor]:
        tensors = self.tensors if only is None else [self.tensors[only]]
        return [tensor.narrow(2, start, stop - start) for tensor in tensors]

    def spans(self, first: int, stop: int) -> list[Span]:
        limit = self.store.limit
        if first >= stop:
            return []
        if limit is None:
            return [Span(first, first, stop - first)]
        wrap = min(stop, (first // limit + 1) * limit)
        spans = [Span(first, first % limit, wrap - first)]
        return spans if wrap == stop else [*spans, Span(wrap, 0, stop - wrap)]

    def restore(
        self, records: Sequence[Tensor], stops: Sequence[int], firsts: Sequence[int]
    ) -> None:
        self.reserve(max(stops))
        self.stops, self.firsts = [*stops], [*firsts]
        for tensor, record in zip(self.tensors, records, strict=True):
            tensor[:, :, : record.shape[2]] = record

    def add_positions(self, store: Store, base: int) -> None:
        units = self.units(0, self.capacity)
        self.store = store
        self.tensors.append(positions_of(units, base, store.tokens)[:, None].to(self.device))

    def fork(self) -> Self:
        other = type(self)(self.store, 0, self.device)
        other.stops, other.firsts = [*self.stops], [*self.firsts]
        with torch.inference_mode(False), torch.no_grad():
            other.tensors = [tensor.clone() for tensor in self.tensors]
        return other

    def of_row(self, row: int) -> Rows:
        """One batch row by itself, in the same memory."""
        other = type(self)(self.store, 0, self.device)
        other.stops, other.firsts = [self.stops[row]], [self.firsts[row]]
        other.tensors = [tensor[row : row + 1] for tensor in self.tensors]
        return other

    def reorder(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        for i, tensor in enumerate(self.tensors):
            with torch.inference_mode(False), torch.no_grad():
                self.tensors[i] = tensor.index_select(0, index)
        self.stops = [self.stops[row] for row in rows]
        self.firsts = [self.firsts[row] for row in rows]


def _each(units: int | Sequence[int], rows: int) -> Sequence[int]:
    return [units] * rows if isinstance(units, int) else units


def with_one(counts: list[int], row: int, count: int) -> list[int]:
    """A new list with another count for a row."""
    return [*counts[:row], count, *counts[row + 1 :]]


def positions_of(units: Tensor, base: int, tokens: int) -> Tensor:
    """``[..., tokens]`` places of the tokens of each unit."""
    with torch.inference_mode(False):
        return base + units[..., None] * tokens + torch.arange(tokens, device=units.device)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Made outside inference mode: later writes outside that mode would fail on an inference tensor.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def clear_scales(store: Store, part: Tensor) -> None:
    """Sets scales and zero points that nobody has written to 0; other tensors stay as they are.

    Kernels compute a block in which anything is not finite another way. With what memory held
    before, the last bits of rows of different lengths would be those of chance.
    """
    if store.tokens > 1 and part.dtype == SCALE_DTYPE:
        part.zero_()
