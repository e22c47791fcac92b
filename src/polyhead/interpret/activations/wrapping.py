"""Calls of a method of one module, seen and changed by a trace.

A method that is replaced on one object keeps native code away from it (``layers/exact.py``), which
is what a trace needs that wants to see what happens inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from torch import nn

from polyhead.layers.scope import Scope

Around = Callable[..., Any]
"""``around(call, *arguments, **options)`` returns what the caller gets."""

_LOCK = Lock()


class _Wrapped:
    """What stands in the place of a method while there are traces of it."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.was_replaced = method in vars(module)
        self.call = getattr(module, method)
        self.arounds: dict[object, tuple[Scope, Around]] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        call = self.call
        for scope, around in tuple(self.arounds.values()):
            if scope.is_here:
                call = partial(around, call)
        return call(*arguments, **options)


@contextmanager
def wrapped(module: nn.Module, method: str, scope: Scope, around: Around) -> Iterator[None]:
    """Calls ``around(call, …)`` for every call of a method, in the thread or task of ``scope``.

    Blocks may end in any order; the first that began is called innermost.

    Args:
        module: Whose method.
        method: Its name.
        scope: Whose calls; others are as if there were none.
        around: What is called in its place.
    """
    held, key = vars(module), object()
    with _LOCK:
        found = held.get(method)
        if not isinstance(found, _Wrapped):
            found = held[method] = _Wrapped(module, method)
        found.arounds[key] = scope, around
    try:
        yield
    finally:
        with _LOCK:
            del found.arounds[key]
            if not found.arounds and found.was_replaced:
                held[method] = found.call
            elif not found.arounds:
                del held[method]
