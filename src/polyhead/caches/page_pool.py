"""A pool of pages: tensors, counted references, free pages, a limit.

The pool counts how often each page is pointed to. A page with more than one reference is never
written: the row that wants to write gets a copy of its own first. The tensors grow as pages are
taken, up to the limit if there is one, and ``shrink`` gives memory back.

Forks may be used by threads at the same time, each by one. The pool's lock guards what they share:
counts, free pages and which tensors there are. Pages are read without it: nobody writes to a page
that another fork points to. Native code writes without it too, into pages of one fork; the pool
counts such writers, and is not moved to other tensors before they have finished.

Shape letters: P units in a page.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from polyhead.caches.memory import clear_scales, empty
from polyhead.caches.sizes import Store
from polyhead.errors import CacheFullError


class _Shared(Protocol):
    @property
    def lock(self) -> threading.Condition: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=_Shared)


def locked(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
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
        shares: How often a page got one more.
        limit: Pages that the tensors may have at most; None: any number.
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
        self.limit: int | None = None
        self.shares = 0
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

    @locked
    def __getstate__(self) -> dict[str, Any]:
        known = ("store", "device", "page", "limit", "shares", "tensors", "references", "free")
        state = {name: getattr(self, name) for name in known}
        return state | {name: [*state[name]] for name in known[5:]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def available(self) -> int:
        """Pages that can be taken: up to the limit, or without more memory if there is none."""
        self.collect()
        grown = 0 if self.limit is None else self.limit - len(self.references)
        return len(self.free) + grown

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page * self.store.unit_bytes

    def lacks(self, pages: int) -> bool:
        """Whether ``reserve`` would move the pool to larger tensors."""
        self.collect()
        return pages > len(self.free)

    @locked
    def reserve(self, pages: int) -> None:
        """Makes room until ``pages`` pages are free; doubles, as a store without pages does.

        Waits for native code that writes into the tensors.

        Raises:
            CacheFullError: That is more than the limit; nothing has changed.
        """
        if self.lacks(pages):
            self._check_limit(pages)
            self._wait_for_writers(lambda: self.lacks(pages))
        if not self.lacks(pages):
            return
        self._check_limit(pages)  # others may have taken some
        have = len(self.references)
        wanted = max(have - len(self.free) + pages, 2 * have)
        if self.limit is not None:
            wanted = min(wanted, self.limit)
        self._move(wanted)
        self.references += [0] * (wanted - have)
        self.free[:0] = range(wanted - 1, have - 1, -1)

    @locked
    def shrink(self) -> int:
        """Gives memory back: the tensors end with the last page that something points to.

        Waits for native code that writes into the tensors. They grow again when pages are taken.

        Returns:
            The bytes that were given back.
        """
        self._wait_for_writers(lambda: True)
        self.collect()
        kept = max((page + 1 for page, count in enumerate(self.references) if count), default=0)
        before = sum(tensor.nbytes for tensor in self.tensors)
        # Counted first: if memory runs out below, tensors are larger than needed, which is right.
        del self.references[kept:]
        self.free[:] = [page for page in self.free if page < kept]
        self._move(kept)
        return before - sum(tensor.nbytes for tensor in self.tensors)

    def _move(self, pages: int) -> None:
        """Makes tensors of so many pages, field by field, with the content of those there are."""
        self._views = []  # views would keep the old tensors
        have = min(pages, len(self.references))
        for i, old in enumerate(self.tensors):
            if old.shape[1] != pages:
                new = empty((old.shape[0], pages, *old.shape[2:]), old.dtype, self.device)
                new[:, :have] = old[:, :have]  # larger if memory ran out the last time
                clear_scales(self.store, new[:, have:])
                self.tensors[i] = new
            del old

    def _check_limit(self, pages: int) -> None:
        if self._is_over(pages):
            raise CacheFullError(
                f"a cache needs {pages:,} more pages of {self.page} tokens: {self.available:,} of "
                f"{self.limit:,} are free"
            )

    def _is_over(self, pages: int) -> bool:
        return self.limit is not None and pages > self.available

    def _wait_for_writers(self, wanted: Callable[[], bool]) -> None:
        """Waits for native code that writes, as long as ``wanted``; nobody else begins."""
        self.movers += 1
        try:
            while self.writers and wanted():
                self.lock.wait()
        finally:
            self.movers -= 1

    def begin_writing(self, pages: int) -> bool:
        """Counts one who writes without the lock, until ``end_writing``; ``pages`` are then free.

        Never waits: False, and nobody is counted, where that would take waiting for others, or
        more pages than the limit.
        """
        if self.movers or (self.lacks(pages) and (self.writers or self._is_over(pages))):
            return False
        self.reserve(pages)
        self.writers += 1
        return True

    @locked
    def end_writing(self) -> None:
        self.writers -= 1
        if self.movers:
            self.lock.notify_all()

    @locked
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
        self.shares += 1
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
