"""Errors of the libraries written in Rust (tokenizers, safetensors), as polyhead's own."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from polyhead.errors import PolyheadError

if TYPE_CHECKING:
    import tokenizers

_MOST_WORDS = 300
_PROBE = "A list's 12 items:\n\t½ 人🤗"


@contextmanager
def refusing(refusal: Callable[[str], PolyheadError]) -> Iterator[None]:
    """Turns any exception that a Rust library raises inside the block into one error.

    They raise bare ``Exception``, and where Rust panics a ``PanicException``, which is no
    ``Exception`` and has no module to import it from.

    Args:
        refusal: Makes the error of what the library says.
    """
    try:
        yield
    except PolyheadError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = " ".join(str(error)[:_MOST_WORDS].split())
        raise refusal(words or type(error).__name__) from error


def try_out(backend: tokenizers.Tokenizer) -> None:
    """Encodes and decodes a text: a file that makes Rust panic is found before it is used.

    Raises:
        PanicException: It panics. Other errors may be about this text alone.
    """
    with suppress(Exception):
        backend.decode(backend.encode(_PROBE).ids)


@contextmanager
def no_backtrace() -> Iterator[None]:
    """Keeps the backtrace that Rust prints when it panics off the screen.

    What else is written to stderr inside the block is written behind it. stderr is one for the
    whole process, so while there are other threads nothing is done.
    """
    if threading.active_count() > 1:
        yield
        return
    try:
        screen = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(screen, 2)
            os.close(screen)
            aside.seek(0)
            if b" panicked at " not in (said := aside.read()):
                os.write(2, said)
