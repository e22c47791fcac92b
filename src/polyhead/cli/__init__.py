"""The entry point ``polyhead``: every failure becomes a sentence and an exit code.

    0    done
    1    failed while running: a file that cannot be written, not enough memory, a bug
    2    bad input: arguments, text, files, models
    130  Ctrl-C (128 + SIGINT)
    141  the reader of a pipe closed it (128 + SIGPIPE); nothing is printed

``--debug`` anywhere on the line, or POLYHEAD_DEBUG=1, shows the traceback as well.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence

from polyhead.cli.encoding import ERRORS

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``polyhead`` with ``arguments`` (default: the process's own); returns its exit code."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    debug = os.environ.get("POLYHEAD_DEBUG", "0") not in ("", "0")
    options = line[: line.index("--")] if "--" in line else line
    if "--debug" in options:
        line.remove("--debug")
        debug = True
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Mathematical symbols must not fail on a terminal whose encoding lacks them.
            stream.reconfigure(errors=ERRORS)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            code = _run(line)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return INTERRUPTED
    except Exception as error:
        if _is_closed_pipe(error):
            _abandon(sys.stdout)
            return PIPE_CLOSED
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        _complain(f"error: {message}")
    return code


def _run(line: list[str]) -> int:
    from typer import Exit

    from polyhead.cli.app import command, printed_help, verbs_of

    if "_POLYHEAD_COMPLETE" in os.environ:  # a shell asks for completions
        command().main(line, "polyhead")
    if printed_help(line):
        return 0
    verb = command(verbs_of(line))
    try:
        # Command.main would print and swallow errors its own way; this leaves them to us.
        with verb.make_context("polyhead", line) as context:
            verb.invoke(context)
    except Exit as exit_:
        return exit_.exit_code
    return 0


def _is_closed_pipe(error: Exception) -> bool:
    """Whether stdout's reader is gone; Windows calls writing to it an invalid argument."""
    if os.name == "nt" and isinstance(error, OSError) and error.filename is None:
        return error.errno in (errno.EPIPE, errno.EINVAL)
    return isinstance(error, BrokenPipeError)


def _explain(error: Exception) -> tuple[str, int]:
    """One sentence and an exit code for what went wrong."""
    from polyhead.errors import DisagreementError, PolyheadError

    if hasattr(error, "format_message"):  # a wrong option or argument, found by typer
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "polyhead"
        message = " ".join(str(error.format_message()).split()).rstrip(".")
        message = re.sub(r"\. Did you mean (.+)\?$", r" (did you mean \1?)", message)
        return f"{message}; see {path} --help", 2
    if isinstance(error, DisagreementError):
        return _sentence(error), 1
    if isinstance(error, PolyheadError | ValueError):
        return _sentence(error), 2
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        where = f" {str(error.filename)!r}" if error.filename is not None else ""
        if error.filename is None and sys.stdout is not None:
            _abandon(sys.stdout)  # stdout may have failed: do not write to it again at exit
        return f"cannot access{where}: {reason}" if where else f"input/output error: {reason}", 1
    if isinstance(error, MemoryError):
        return "not enough memory", 1
    name = type(error).__name__
    return f"{name}: {_sentence(error)} (this is a bug: --debug shows the traceback)", 1


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _warn(message: Warning | str, *where: object) -> None:
    """A warning as a sentence, without the place in the code that gave it."""
    _complain(f"warning: {' '.join(str(message).split())}")


def _complain(message: str) -> None:
    try:
        print(_wrapped(message) if sys.stderr.isatty() else message, file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def _wrapped(message: str) -> str:
    """Lines of the terminal's width; an install command stays in one, to be copied."""
    import re
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    whole = re.sub(r"pip install [^()\n]*", lambda found: found[0].replace(" ", "\0"), message)
    lines = (
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in whole.splitlines()
    )
    return "\n".join(lines).replace("\0", " ")


def _abandon(stream: object) -> None:
    """Points a broken stream at nothing, so that the interpreter's last flush does not complain."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())  # type: ignore[attr-defined]
        os.close(nothing)
    except (OSError, ValueError, AttributeError):
        return
