"""Errors of the libraries written in Rust (tokenizers, safetensors), as polyhead's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polyhead.errors import PolyheadError

_MOST_WORDS = 300


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
