"""A cache is used by one thread at a time: a second one gets an error, before anything is lost.

Threads may take turns. What is refused is a call that begins while another thread is in the middle
of one: both would write to the same place, and tokens would be lost silently."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch

from polyhead.errors import SharedCacheError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class InUse:
    """``with cache.in_use:`` around what no other thread may interrupt; it may be entered again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._afterwards: list[Callable[[], None]] = []

    def afterwards(self, span: Callable[[], None]) -> None:
        """Calls something when the thread, which uses the cache now, leaves it."""
        self._afterwards.append(span)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.refuse()

    def refuse(self) -> NoReturn:
        raise SharedCacheError(
            "this cache is in use by another thread: give every thread a cache of its own; "
            "fork() copies one"
        )

    def __exit__(self, *error: object) -> None:
        while self._afterwards:
            self._afterwards.pop()()
        self._lock.release()

    def __reduce__(self) -> tuple[type[InUse], tuple[()]]:
        return InUse, ()  # a copy of a cache is another cache


class _Used(Protocol):
    @property
    def in_use(self) -> InUse: ...


class AllInUse:
    """``with AllInUse(caches):`` enters what each has in ``in_use``, or none of them."""

    __slots__ = ("_all", "_entered")

    def __init__(self, users: Iterable[_Used]) -> None:
        self._all = [user.in_use for user in users]
        self._entered: list[InUse] = []

    def __enter__(self) -> None:
        entered = self._entered
        for in_use in self._all:
            if not in_use._lock.acquire(False):
                self.__exit__()
                in_use.refuse()
            entered.append(in_use)

    def __exit__(self, *error: object) -> None:
        for in_use in self._entered:
            if in_use._afterwards:
                in_use.__exit__()
            else:
                in_use._lock.release()


_S = TypeVar("_S", bound=_Used)


def alone(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Marks a method of a cache that only one thread may run at a time."""

    @functools.wraps(method)
    def guarded(self: _S, *arguments: _P.args, **options: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():  # a compiler cannot trace a lock
            return method(self, *arguments, **options)
        with self.in_use:
            return method(self, *arguments, **options)

    return guarded  # type: ignore[return-value]  # mypy keeps the name "self" in its type


def alone_with_cache(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function: no other thread may use its ``cache=`` while it runs."""

    @functools.wraps(method)
    def guarded(*arguments: _P.args, **options: _P.kwargs) -> _R:
        in_use = getattr(options.get("cache"), "in_use", None)
        if not isinstance(in_use, InUse) or torch.compiler.is_compiling():
            return method(*arguments, **options)
        with in_use:
            return method(*arguments, **options)

    return guarded
