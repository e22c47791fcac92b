"""The thread or task that something was opened in: what hooks and edits hold for.

Threads share a model. A hook that one of them registers would see the calls of all, so every hook
and edit belongs to the thread or task (``contextvars``) that registered it, and to the tasks that
it starts afterwards; others use the model as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_OPEN: ContextVar[frozenset[Scope]] = ContextVar("polyhead_open_scopes", default=frozenset())


class Scope:
    """Open from now on, in the thread or task that made it, until ``close``."""

    def __init__(self) -> None:
        _OPEN.set(_OPEN.get() | {self})

    @property
    def is_here(self) -> bool:
        """Whether the caller is the thread or task that made it, or was started by that task."""
        return self in _OPEN.get()

    def close(self) -> None:
        """Ends it; a second call does nothing."""
        _OPEN.set(_OPEN.get() - {self})

    def only(self, callback: Callable[..., None]) -> Callable[..., None]:
        """``callback``, for a torch hook: called here, and nowhere else."""

        def called(*arguments: Any, **options: Any) -> None:
            if self.is_here:
                callback(*arguments, **options)

        return called
