"""Pages that sequences share: rows of a pool, copy-on-write.

PagedAttention (Kwon et al. 2023). ``table[row][i]`` is the page that holds units i · page to
(i + 1) · page of a batch row. Forks, beams and common prefixes point to the same pages of a pool
(``page_pool.py``).

Shape letters: B batch, P units in a page, m pages, n units.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from polyhead.caches.memory import Memory, Span, empty, positions_of
from polyhead.caches.page_pool import PagePool, locked
from polyhead.caches.sizes import Store
from polyhead.semantics.sources import PageTable

WITHOUT_INDEX = frozenset({"cpu"})
"""Devices where writing makes the numbers of its pages anew, and keeps no index of all."""
_PAGES_TO_COME = 8
"""Pages of a row that an index has room for beyond the longest row, so that few are made anew."""


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
        self._numbers = array("q")  # the memory of the index
        self._fitting = self.stops, 0, 0  # for which stops and ``pool.shares``: ``_room()``
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
        self._own(self._lacking((row, (start, count)) for row in touched))
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
        self._own(self._lacking(enumerate((stop, count) for stop in self.stops)))
        pages = [[row[n // page] for n in new] for row, new in zip(self.table, units, strict=True)]
        where = torch.tensor(pages), torch.tensor([[n % page for n in new] for new in units])
        for tensor, record in zip(self.tensors, records, strict=True):
            tensor.permute(1, 2, 0, 3)[where] = record.transpose(1, 2)
        self.count(None, count)

    @locked
    def reserve_slots(self, counts: Sequence[int]) -> tuple[list[Tensor], Tensor] | None:
        """Counts units of every row, in pages of its own, that the caller is going to write.

        Nobody moves the pages before the caller says ``pool.end_writing()``.

        Returns:
            ``as_views()`` and ``page_index()`` with them. None, and nothing is counted, where other
            threads would have to be waited for.
        """
        pool, most, room = self.pool, max(counts), self._room()
        if most <= room and not pool.movers:
            pool.writers += 1
            self.count(None, counts)
            self._fitting = self.stops, pool.shares, room - most
        else:
            new = self._lacking(enumerate(zip(self.stops, counts, strict=True)))
            if not pool.begin_writing(self._taken(new)):
                return None
            self._own(new)
            self.count(None, counts)
        return self.as_views(), self.page_index()

    def _room(self) -> int:
        """Units that every row can take in its last page, if that is no other sequence's too."""
        stops, shares, room = self._fitting
        if stops is self.stops and shares == self.pool.shares:
            return room
        page, references = self.pool.page, self.pool.references
        room = min((-stop % page for stop in self.stops), default=0)
        if room and any(references[row[-1]] > 1 for row in self.table):
            room = 0
        self._fitting = self.stops, self.pool.shares, room
        return room

    def as_views(self) -> list[Tensor]:
        """``[pages, heads, P, width]`` per field, views."""
        return self.pool.as_views()[: len(self.store.fields)]

    def _lacking(self, new: Iterable[tuple[int, tuple[int, int]]]) -> dict[int, range]:
        """Of rows, with their first new units and how many, those that lack pages of their own."""
        size, references, table = self.pool.page, self.pool.references, self.table
        return {
            row: range(start, start + count)
            for row, (start, count) in new
            if start + count > len(table[row]) * size
            or (start % size and references[table[row][-1]] > 1)
        }

    def _taken(self, lacking: Mapping[int, range]) -> int:
        """Pages that ``_own`` takes."""
        fresh, shared = 0, Counter[int]()
        size, references = self.pool.page, self.pool.references
        for row, units in lacking.items():
            pages = self.table[row]
            fresh += max(0, self.store.pages(units.stop) - len(pages))
            if units.start % size and references[pages[-1]] > 1:
                shared[pages[-1]] += 1
        # The last row of all that point to a page keeps it.
        return fresh + sum(min(n, references[page] - 1) for page, n in shared.items())

    def _own(self, lacking: Mapping[int, range]) -> None:
        """Pages for units of some rows that no other sequence uses."""
        if not lacking:
            return
        self.pool.reserve(self._taken(lacking))
        for row, units in lacking.items():
            pages = self.table[row]
            if units.start % self.pool.page and self.pool.references[pages[-1]] > 1:
                pages[-1] = self.pool.own(pages[-1])
                self._index = None
            while len(pages) < self.store.pages(units.stop):
                pages.append(self.pool.take())
                self._add_to_index(row)

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
        """``[B, m]`` the table; numbers beyond a row's pages are of any page, and masks hide it."""
        if self._index is None:
            more = _PAGES_TO_COME if self.device.type == "cpu" else 0
            longest = max(map(len, self.table), default=0) + more
            self._numbers = array("q", bytes(8 * longest * len(self.table)))
            for row, pages in enumerate(self.table):
                self._numbers[row * longest : row * longest + len(pages)] = array("q", pages)
            index = torch.empty(len(self.table), longest, dtype=torch.int64, device="cpu")
            if not self._numbers:
                return index.to(self.device)
            if type(index) is Tensor:
                index = torch.frombuffer(self._numbers, dtype=torch.int64).view(index.shape)
            else:  # a tensor without memory, where shapes alone are computed
                self._numbers = array("q")
            if self.device.type == "cuda":
                index = index.pin_memory()  # else the copy would wait for the device
            if self.device.type != "cpu":
                index = index.to(self.device, non_blocking=True)
            self._index = index
        return self._index

    def _add_to_index(self, row: int) -> None:
        """The index with the page that a row has just got, as long as there is room in it."""
        index, place = self._index, len(self.table[row]) - 1
        if index is not None and index.is_cpu and self._numbers and place < index.shape[1]:
            self._numbers[row * index.shape[1] + place] = self.table[row][place]
        else:
            self._index = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None, "_numbers": array("q")}  # which share memory

    def spans(self, first: int, stop: int) -> list[Span]:
        return [Span(first, first, stop - first)] if first < stop else []

    @locked
    def cut(self, row: int, stop: int) -> None:
        super().cut(row, stop)
        dropped = self.table[row][self.store.pages(stop) :]
        if dropped:  # else the index is made anew after every guess that was wrong
            self.pool.release(dropped)
            del self.table[row][-len(dropped) :]
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
