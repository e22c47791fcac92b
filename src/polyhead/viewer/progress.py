"""The progress of a run of a model, and a way to stop it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.models import Transformer


class Cancelled(InputError):
    """A run was stopped because its client has disconnected."""


class ModelRun:
    """One run of a model, as the client that waits for it sees it.

    Attributes:
        done: Layers that have run.
        layers: Layers of the model; 0 until it runs.
    """

    def __init__(self) -> None:
        self.done = self.layers = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends the run before its next layer."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether it was stopped."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Raises ``Cancelled`` where the run was stopped."""
        if self.stopped:
            raise Cancelled("the look was cancelled")

    def wait(self, lock: threading.Lock) -> None:
        """Takes a lock, unless the run is stopped meanwhile."""
        while not lock.acquire(timeout=0.1):
            self.check()

    @contextmanager
    def watching(self, model: Transformer) -> Iterator[None]:
        """Counts the layers of a model that run inside the block, and stops between them."""
        layers = [*model.layers]
        self.done, self.layers = 0, len(layers)
        with ExitStack() as hooks:
            for number, layer in enumerate(layers):
                hook = layer.register_forward_pre_hook(partial(self._begin, number))
                hooks.callback(hook.remove)
            yield
        self.done = self.layers

    def _begin(self, number: int, *call: Any) -> None:
        self.check()
        self.done = number
