"""Pages that sequences share: a pool of pages, counted references, copy-on-write.

PagedAttention (Kwon et al. 2023). ``table[row][i]`` is the page that holds units i · page to
(i + 1) · page of a batch row. Forks, beams and common prefixes point to the same pages; the pool
counts how often each is pointed to. A page with more than one reference is never written: the row
that wants to write gets a copy of its own first.

Forks may be used by threads at the same time, each by one. The pool's lock guards what they share:
counts, free pages and which tensors there are. Pages are read without it: nobody writes to a page
that another fork points to. Native code writes without it too, into pages of one fork; the pool
counts such writers, and is not moved to larger tensors before they have finished.

Shape letters: B batch, P units in a page, m pages, n units.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor

from polyhead.caches.memory import Memory, Span, clear_scales, empty, positions_of
from polyhead.caches.sizes import Store
from polyhead.semantics.sources import PageTable


class _Shared(Protocol):
    @property
    def lock(self) -> threading.Condition: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=_Shared)


def _locked(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Marks a method that one thread at a time runs, of all forks."""

    @functools.wraps(method)
    def guarded(self: _S, *arguments: _P.args, **options: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():  # a compiler cannot trace a lock
            return method(self, *arguments, **options)
        with self.lock:
            return method(self, *arguments, **options)

    return guarded  # type: ignore[return-value]  # mypy keeps the name "self" in its type


class PagePool:
    """``[heads, pages, P, width]`` per field, for one cache and all that were forked from it.

    Attributes:
        tensors: One per field.
        references: How many table entries point to each page.
        free: Pages that none points to; the last is handed out next.
        lock: Held while any of these changes. A thread that waits for it holds no other pool's.
        writers: Steps of native code that write into the tensors, without the lock.
        movers: Threads that wait for these to finish.
        returned: Tables of forks that were collected, whose pages are still to be released.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self.device = store, device
        self.page = store.page or 1
        self.tensors = [
            empty((field.heads, 0, self.page, field.width), field.dtype, device)
            for field in store.fields
        ]
        self.references: list[int] = []
        self.free: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """What threads agree by; a copy of a pool has its own."""
        self._lock = threading.Condition()  # of a lock that its thread may take again
        self.writers = self.movers = 0
        self.returned: deque[list[list[int]]] = deque()
        self._views: list[Tensor] = []

    @property
    def lock(self) -> threading.Condition:
        return self._lock

    @_locked
    def __getstate__(self) -> dict[str, Any]:
        known = ("store", "device", "page", "tensors", "references", "free")
        state = {name: getattr(self, name) for name in known}
        return state | {name: [*state[name]] for name in known[3:]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def lacks(self, pages: int) -> bool:
        """Whether ``reserve`` would move the pool to larger tensors."""
        self.collect()
        return pages > len(self.free)

    @_locked
    def reserve(self, pages: int) -> None:
        """Makes room until ``pages`` pages are free; doubles, as a store without pages does.

        Waits for native code that writes into the tensors.
        """
        self.movers += 1
        try:
            while self.lacks(pages) and self.writers:
                self.lock.wait()
        finally:
            self.movers -= 1
        if not self.lacks(pages):
            return
        have = len(self.references)
        wanted = max(have - len(self.free) + pages, 2 * have)
        self._views = []  # views would keep the old tensors
        for i, old in enumerate(self.tensors):
            new = empty((old.shape[0], wanted, *old.shape[2:]), old.dtype, self.device)
            new[:, :have] = old[:, :have]  # larger if memory ran out the last time
            clear_scales(self.store, new[:, have:])
            self.tensors[i] = new
            del old
        self.references += [0] * (wanted - have)
        self.free[:0] = range(wanted - 1, have - 1, -1)

    def begin_writing(self, pages: int) -> bool:
        """Counts one who writes without the lock, until ``end_writing``; ``pages`` are then free.

        Never waits: False, and nobody is counted, where that would take waiting for others.
        """
        if self.movers or (self.writers and self.lacks(pages)):
            return False
        self.reserve(pages)
        self.writers += 1
        return True

    @_locked
    def end_writing(self) -> None:
        self.writers -= 1
        self.lock.notify_all()

    @_locked
    def as_views(self) -> list[Tensor]:
        """``[pages, heads, P, width]`` per field, views."""
        if len(self._views) != len(self.tensors):
            self._views = [tensor.transpose(0, 1) for tensor in self.tensors]
        return self._views

    def take(self) -> int:
        """A page that nothing else points to."""
        self.reserve(1)
        page = self.free.pop()
        self.references[page] = 1
        return page

    def own(self, page: int) -> int:
        """The page itself where it has one reference, else a copy that replaces one of them."""
        if self.references[page] == 1:
            return page
        copy = self.take()
        for tensor in self.tensors:
            tensor[:, copy] = tensor[:, page]
        self.release([page])  # others may have released it meanwhile
        return copy

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    def collect(self) -> None:
        """Releases the pages of forks that nobody holds, unless another thread has the lock."""
        if self.returned and self.lock.acquire(blocking=False):
            try:
                while self.returned:
                    self.release(page for row in self.returned.popleft() for page in row)
            finally:
                self.lock.release()


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
    @_locked  # not in the middle of a move
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

    @_locked
    def reserve(self, units: int) -> None:
        wanted = self.store.pages(units)
        self.pool.reserve(sum(max(0, wanted - len(row)) for row in self.table))

    @_locked
    def put(self, rows: Sequence[int] | None, start: int, records: Sequence[Tensor]) -> None:
        touched = range(len(self.stops)) if rows is None else rows
        count, page = records[0].shape[2], self.pool.page
        if not count:
            return
        self._own(dict.fromkeys(touched, start), count)
        unit, first = torch.arange(start, start + count, device=self.device), start // page
        if self.device.type in WITHOUT_INDEX:
            pages = torch.tensor([self.table[row][first:] for row in touched], device="cpu")
        else:
            index = self.page_index() if rows is None else self.page_index()[list(rows)]
            pages = index[:, first:]
        where = pages[:, unit // page - first], unit % page
        for tensor, record in zip(self.tensors, records, strict=True):
            tensor.permute(1, 2, 0, 3)[where] = record.transpose(1, 2)

    @_locked
    def append_to_each(self, records: Sequence[Tensor]) -> None:
        """Appends ``[B, heads, n, width]`` per field in one write; rows may differ in length."""
        count, page = records[0].shape[2], self.pool.page
        self._own(dict(enumerate(self.stops)), count)
        units = [range(stop, stop + count) for stop in self.stops]
        pages = [[row[n // page] for n in new] for row, new in zip(self.table, units, strict=True)]
        where = torch.tensor(pages), torch.tensor([[n % page for n in new] for new in units])
        for tensor, record in zip(self.tensors, records, strict=True):
            tensor.permute(1, 2, 0, 3)[where] = record.transpose(1, 2)
        self.count(None, count)

    @_locked
    def reserve_slots(self, count: int) -> bool:
        """Counts units in every row, in pages of its own, that the caller is going to write.

        Nobody moves the pages before the caller says ``pool.end_writing()``.

        Returns:
            False, and nothing is counted, where other threads would have to be waited for.
        """
        starts = dict(enumerate(self.stops))
        if not self.pool.begin_writing(self._taken(starts, count)):
            return False
        self._own(starts, count)
        self.count(None, count)
        return True

    def as_views(self) -> list[Tensor]:
        """``[pages, heads, P, width]`` per field, views."""
        return self.pool.as_views()[: len(self.store.fields)]

    def _taken(self, starts: Mapping[int, int], count: int) -> int:
        """Pages that ``_own`` takes."""
        fresh, begun = 0, Counter[int]()
        for row, start in starts.items():
            fresh += max(0, self.store.pages(start + count) - len(self.table[row]))
            if start % self.pool.page:
                begun[self.table[row][-1]] += 1
        # The last row of all that point to a page keeps it.
        return fresh + sum(min(n, self.pool.references[page] - 1) for page, n in begun.items())

    def _own(self, starts: Mapping[int, int], count: int) -> None:
        """Pages for units of some rows, from their starts on, that no other sequence uses."""
        self.pool.reserve(self._taken(starts, count))
        for row, start in starts.items():
            pages = self.table[row]
            if start % self.pool.page and self.pool.references[pages[-1]] > 1:
                pages[-1] = self.pool.own(pages[-1])
                self._index = None
            while len(pages) < self.store.pages(start + count):
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
            self._index = index.to(self.device, non_blocking=True)
        return self._index

    def spans(self, first: int, stop: int) -> list[Span]:
        return [Span(first, first, stop - first)] if first < stop else []

    @_locked
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

    @_locked
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

    @_locked
    def fork(self) -> Self:
        other = type(self)(self.store, 0, self.device, self.pool)
        other.stops, other.firsts = [*self.stops], [*self.firsts]
        self.pool.share(page for row in self.table for page in row)
        other.table[:] = [[*row] for row in self.table]
        return other

    @_locked
    def reorder(self, rows: Sequence[int]) -> None:
        table = [[*self.table[row]] for row in rows]
        self.pool.share(page for row in table for page in row)
        self.pool.release(page for row in self.table for page in row)
        # In place: the finalizer refers to this list object.
        self.table[:] = table
        self.stops = [self.stops[row] for row in rows]
        self.firsts = [0] * len(rows)
        self._index = None

    @_locked
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
