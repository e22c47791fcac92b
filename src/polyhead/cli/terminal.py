"""What the verbs share: where they write, progress bars, and reading the user's text."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from polyhead.cli.encoding import can_write
from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.generation import TextStream

BOLD, FAINT = "1", "2"

_PIPE_WIDTH = 100
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    """Leaves a closed pipe to ``polyhead.cli.main``, where Console would end the process itself."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console that keeps numbers and tokens as they are: no markup, emoji or highlighting.

    A pipe or file gets plain text of 100 columns, unless COLUMNS says otherwise.
    """
    stream = sys.stderr if stderr else sys.stdout
    piped = stream is None or not stream.isatty()
    width = _PIPE_WIDTH if piped and not os.environ.get("COLUMNS") else None
    return _Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False
    )


def plain_table(*headings: str, right: Collection[str] = ()) -> Table:
    """A table with a line under its headings; columns named in ``right`` are right-aligned."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """Writes one JSON document to standard output, readable and strictly valid."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=indent)
    print(text if can_write(text) else json.dumps(data, allow_nan=False, indent=indent))


def write_text(text: str, *, style: str = "") -> None:
    """Writes text to standard output at once, in an ANSI style where that is a terminal.

    A terminal never gets control characters, whatever the text: they could move the cursor or
    worse. A pipe or file gets the text as it is.
    """
    if sys.stdout.isatty():
        text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
        if style and console().color_system is not None:
            text = f"\x1b[{style}m{text}\x1b[0m"
    sys.stdout.write(text)
    sys.stdout.flush()


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


def started(stream: TextStream) -> Iterator[str]:
    """The pieces of a stream, with a bar on the terminal until the first has come."""
    with progress(f"reading {stream.stats.prompt_tokens:,} tokens"):
        first = next(stream, None)
    if first is not None:
        yield first
        yield from stream


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
        source, content = str(file), read_file(file)
    elif text == "-":
        source, content = "standard input", sys.stdin.buffer.read()
    else:
        source, content = "TEXT", os.fsencode(text or "")
    decoded = _decode(content, source)
    if not decoded.strip():
        raise InputError(f"{source} is empty: give at least one character")
    return decoded


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
