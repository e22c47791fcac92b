"""What an error of a case is worth: a sentence that polyhead wrote, or a failure."""

from __future__ import annotations

import dis
import traceback
from types import TracebackType

from polyhead.errors import PolyheadError

_MOST_CHARACTERS, _MOST_LINES = 2_000, 6


def flaw(error: BaseException) -> str | None:
    """Why an error is no answer to bad input; None: it is a sentence that polyhead wrote.

    A ``TypeError`` or ``ValueError`` that Python or a library raised is none, since it tells of an
    operation inside polyhead and not of the input.
    """
    if not isinstance(error, PolyheadError | ValueError | TypeError):
        return f"{type(error).__name__} is no PolyheadError, ValueError or TypeError"
    if not isinstance(error, PolyheadError) and not _raised_by_polyhead(error.__traceback__):
        return f"{type(error).__name__} comes from inside and not from a check of the input"
    message = str(error)
    if " " not in message.strip():
        return "the message is no sentence"
    if len(message) > _MOST_CHARACTERS or message.count("\n") >= _MOST_LINES:
        return f"the message has {len(message):,} characters in {message.count(chr(10)) + 1} lines"
    return None


def place(error: BaseException) -> str:
    """Where an error was raised, innermost last, so that repeats of one failure are seen."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " > ".join(f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in frames)


def _raised_by_polyhead(trace: TracebackType | None) -> bool:
    """Whether a ``raise`` statement of polyhead raised it."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    raised = dis.opname[code.co_code[trace.tb_lasti]].startswith(("RAISE_VARARGS", "RERAISE"))
    return raised and name.split(".")[0] == "polyhead"
