"""Says what a call waits for, if that takes longer than a moment: kernels that are compiled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOMENT = 1.0
"""Seconds after which a wait is worth a line."""

_waits: list[str] = []


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Logs a warning, which Python shows on stderr by default, if what follows is not done soon.

    Kernels that Triton finds compiled on the disk are loaded within the moment, without a word.
    Within another wait nothing more is said.
    """
    if _waits:
        yield
        return
    log = logging.getLogger("polyhead").warning
    said = threading.Timer(MOMENT, log, [f"{what}: this call waits for it, once per machine"])
    said.daemon = True
    _waits.append(what)
    said.start()
    try:
        yield
    finally:
        said.cancel()
        _waits.pop()
