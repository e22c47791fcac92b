"""What the verbs share: where they write, progress bars, and reading the user's text."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from polyhead.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 100


def console(*, stderr: bool = False) -> Console:
    """A console that keeps numbers and tokens as they are: no markup, emoji or highlighting.

    A pipe or file gets plain text of 100 columns, unless COLUMNS says otherwise.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    piped = stream is None or not stream.isatty()
    width = _PIPE_WIDTH if piped and not os.environ.get("COLUMNS") else None
    return Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False
    )


def print_json(data: Any) -> None:
    """Writes one JSON document to standard output, readable and strictly valid."""
    print(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


class Advance(Protocol):
    """Reports ``done`` of ``total`` units of the work named ``what``."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@contextmanager
def progress(what: str) -> Iterator[Advance]:
    """A bar on standard error, only on a terminal, that leaves nothing behind.

    It pulses under the name ``what`` until the work reports how far it is.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield advance


def read_text(text: str | None, file: Path | None) -> str:
    """The text that a verb works on: an argument, ``@file``, ``-`` (standard input) or ``--file``.

    ``@@`` at the beginning stands for one @. One line break at the end of a file is dropped.

    Raises:
        InputError: none or two were given, the file cannot be read, is not UTF-8, or is empty.
    """
    if text is not None and file is not None:
        raise InputError("give TEXT or --file, not both")
    if file is None and text is None:
        raise InputError("no text: give TEXT, @FILE, - for standard input, or --file FILE")
    if file is None and text is not None and text.startswith("@"):
        if not text.startswith("@@"):
            file = Path(text[1:])
        text = text[1:]
    if file is not None:
        content = _decode(read_file(file), str(file))
    elif text == "-":
        content = _decode(sys.stdin.buffer.read(), "standard input")
    else:
        content = _decode(os.fsencode(text or ""), "TEXT")
    if not content.strip():
        raise InputError(f"{file or 'TEXT'} is empty: there is nothing to look at")
    return content


def read_file(file: Path) -> bytes:
    """The bytes of a file that the user named; InputError says why it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot read {str(file)!r}: {reason}") from error


def _decode(content: bytes, source: str) -> str:
    try:
        text = content.decode("utf-8-sig" if source != "TEXT" else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}"
        ) from error
    if source == "TEXT":
        return text
    return text.removesuffix("\n").removesuffix("\r")
