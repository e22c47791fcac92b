"""Pages that sequences share: rows of a pool, copy-on-write.

PagedAttention (Kwon et al. 2023). ``table[row][i]`` is the page that holds units i · page to
(i + 1) · page of a batch row. Forks, beams and common prefixes point to the same pages of a pool
(``page_pool.py``).

Shape letters: B batch, P units in a page, m pages, n units.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from polyhead.caches.memory import Memory, Span, empty, positions_of
from polyhead.caches.page_pool import PagePool, locked
from polyhead.caches.sizes import Store
from polyhead.semantics.sources import PageTable

WITHOUT_INDEX = frozenset({"cpu"})
"""Devices where writing makes the numbers of its pages anew, and keeps no index of all."""


class Pages(Memory):
    """Rows of a pool; forks share it, and give their pages back when they are collected."""

    in_place = False

    def __init__(
        self, store: Store, batch: int, device: torch.device, pool: PagePool | None = None
    ) -> None:
        self.store, self.device = store, device
        self.pool = PagePool(store, device) if pool is None else pool
        self.stops, self.firsts = [0] * batch, [0] * batch
        self.table: list[list[int]] = [[] for _ in range(batch)]
        self._index: Tensor | None = None
        weakref.finalize(self, _release_all, self.pool, self.table)

    @property
    def lock(self) -> threading.Condition:
        return self.pool.lock

    @property
    @locked  # not in the middle of a move
    def tensors(self) -> list[Tensor]:  # type: ignore[override]
        return self.pool.tensors[: len(self.store.fields)]  # without positions of another fork

    @property
    def capacity(self) -> int:
        own = sum(map(len, self.table))
        rows = max(1, len(self.table))
        return (own + len(self.pool.free)) // rows * self.pool.page

    @property
    def used_bytes(self) -> int:
        pages = len({page for row in self.table for page in row})
        return pages * self.pool.page * self.store.unit_bytes

    @locked
    def reserve(self, units: int) -> None:
        wanted = self.store.pages(units)
        self.pool.reserve(sum(max(0, wanted - len(row)) for row in self.table))

    @locked
    def put(self, rows: Sequence[int] | None, start: int, records: Sequence[Tensor]) -> None:
        touched = range(len(self.stops)) if rows is None else rows
        count, page = records[0].shape[2], self.pool.page
        if not count:
            return
        self._own(dict.fromkeys(touched, range(start, start + count)))
        unit, first = torch.arange(start, start + count, device=self.device), start // page
        if self.device.type in WITHOUT_INDEX:
            pages = torch.tensor([self.table[row][first:] for row in touched], device="cpu")
        else:
            index = self.page_index() if rows is None else self.page_index()[list(rows)]
            pages = index[:, first:]
        where = pages[:, unit // page - first], unit % page
        for tensor, record in zip(self.tensors, records, strict=True):
            tensor.permute(1, 2, 0, 3)[where] = record.transpose(1, 2)

    @locked
    def append_to_each(self, records: Sequence[Tensor]) -> None:
        """Appends ``[B, heads, n, width]`` per field in one write; rows may differ in length."""
        count, page = records[0].shape[2], self.pool.page
        units = [range(stop, stop + count) for stop in self.stops]
        self._own(dict(enumerate(units)))
        pages = [[row[n // page] for n in new] for row, new in zip(self.table, units, strict=True)]
        where = torch.tensor(pages), torch.tensor([[n % page for n in new] for new in units])
        for tensor, record in zip(self.tensors, records, strict=True):
            tensor.permute(1, 2, 0, 3)[where] = record.transpose(1, 2)
        self.count(None, count)

    @locked
    def reserve_slots(self, counts: Sequence[int]) -> bool:
        """Counts units of every row, in pages of its own, that the caller is going to write.

        Nobody moves the pages before the caller says ``pool.end_writing()``.

        Returns:
            False, and nothing is counted, where other threads would have to be waited for.
        """
        rows = enumerate(zip(self.stops, counts, strict=True))
        new = {row: range(stop, stop + count) for row, (stop, count) in rows}
        taken = self._taken(new)
        if not self.pool.begin_writing(taken):
            return False
        if taken:
            self._own(new)
        self.count(None, counts)
        return True

    def as_views(self) -> list[Tensor]:
        """``[pages, heads, P, width]`` per field, views."""
        return self.pool.as_views()[: len(self.store.fields)]

    def _taken(self, new: Mapping[int, range]) -> int:
        """Pages that ``_own`` takes."""
        fresh, shared = 0, Counter[int]()
        size, references = self.pool.page, self.pool.references
        for row, units in new.items():
            pages = self.table[row]
            if units.stop > len(pages) * size:
                fresh += self.store.pages(units.stop) - len(pages)
            if units.start % size and references[pages[-1]] > 1:
                shared[pages[-1]] += 1
        # The last row of all that point to a page keeps it.
        return fresh + sum(min(n, references[page] - 1) for page, n in shared.items())

    def _own(self, new: Mapping[int, range]) -> None:
        """Pages for units of some rows that no other sequence uses."""
        self.pool.reserve(self._taken(new))
        for row, units in new.items():
            pages = self.table[row]
            if units.start % self.pool.page and self.pool.references[pages[-1]] > 1:
                pages[-1] = self.pool.own(pages[-1])
                self._index = None
            while len(pages) < self.store.pages(units.stop):
                pages.append(self.pool.take())
                self._index = None

    def read(self, start: int, stop: int, only: int | None = None) -> list[Tensor]:
        tensors = self.tensors if only is None else [self.tensors[only]]
        page = self.pool.page
        first, last = start // page, -(-stop // page)
        index = self.page_index()[:, first:last]
        part = slice(start - first * page, stop - first * page)
        if index.numel() == 1:
            return [tensor[None, :, self.table[0][first], part] for tensor in tensors]
        # One copy: the pages of a head follow on from each other.
        return [tensor[:, index].transpose(0, 1).flatten(2, 3)[:, :, part] for tensor in tensors]

    def pages(self, start: int, stop: int) -> PageTable:
        """Which pages hold units ``start`` to ``stop``."""
        page = self.pool.page
        first, last = start // page, -(-stop // page)
        return PageTable(self.page_index()[:, first:last], start - first * page, stop - start)

    def page_index(self) -> Tensor:
        """``[B, m]`` the table; a row that is shorter repeats a page that the mask hides."""
        if self._index is None:
            longest = max(map(len, self.table), default=0)
            rows = [row + [0] * (longest - len(row)) for row in self.table]
            index = torch.tensor(rows, dtype=torch.int64, device="cpu")
            if self.device.type == "cuda":
                index = index.pin_memory()  # else the copy would wait for the device
            if self.device.type != "cpu":
                index = index.to(self.device, non_blocking=True)
            self._index = index
        return self._index

    def spans(self, first: int, stop: int) -> list[Span]:
        return [Span(first, first, stop - first)] if first < stop else []

    @locked
    def cut(self, row: int, stop: int) -> None:
        super().cut(row, stop)
        keep = self.store.pages(stop)
        self.pool.release(self.table[row][keep:])
        del self.table[row][keep:]
        self._index = None

    def restore(
        self, records: Sequence[Tensor], stops: Sequence[int], firsts: Sequence[int]
    ) -> None:
        self.reserve(max(stops))
        for row, stop in enumerate(stops):
            self.write([row], [record[row : row + 1, :, :stop] for record in records])

    @locked
    def add_positions(self, store: Store, base: int) -> None:
        self.store = store
        page = self.pool.page
        if len(self.pool.tensors) < len(store.fields):
            # A fork may have added them before. Pages that are shared hold the same places.
            shape = (1, len(self.pool.references), page, store.tokens)
            self.pool.tensors.append(empty(shape, torch.int64, self.device).zero_())
        for row in self.table:
            units = torch.arange(len(row) * page, device=self.device).view(len(row), page)
            self.tensors[-1][0, row] = positions_of(units, base, store.tokens)

    @locked
    def fork(self) -> Self:
        other = type(self)(self.store, 0, self.device, self.pool)
        other.stops, other.firsts = [*self.stops], [*self.firsts]
        self.pool.share(page for row in self.table for page in row)
        other.table[:] = [[*row] for row in self.table]
        return other

    @locked
    def reorder(self, rows: Sequence[int]) -> None:
        table = [[*self.table[row]] for row in rows]
        self.pool.share(page for row in table for page in row)
        self.pool.release(page for row in self.table for page in row)
        # In place: the finalizer refers to this list object.
        self.table[:] = table
        self.stops = [self.stops[row] for row in rows]
        self.firsts = [0] * len(rows)
        self._index = None

    @locked
    def append_rows(self, table: Sequence[Sequence[int]], stops: Sequence[int]) -> None:
        """Adds rows that begin with pages of the pool, of which they hold ``stops`` units."""
        self.pool.share(page for row in table for page in row)
        self.table += [[*row] for row in table]
        self.stops, self.firsts = [*self.stops, *stops], [0] * len(self.table)
        self._index = None


def _release_all(pool: PagePool, table: list[list[int]]) -> None:
    # Without waiting for a lock: this runs wherever garbage is collected.
    pool.returned.append(table)
    pool.collect()
