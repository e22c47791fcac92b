"""Runs the command in a real process that is forked from one where torch is imported already.

Starting an interpreter and importing torch takes a second or two, a hundred times over. A process
forked from a warm server has its own standard streams, working directory, environment, signals and
exit code like any other; what differs is only its beginning and the interpreter's last words, and
``test_endings.py`` runs those in processes from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from polyhead.cli.app import VERBS

_PRELOADED = (
    *(f"polyhead.cli.{module}" for module in VERBS.values()),
    "polyhead.generation",
    "polyhead.interpret.heads",
    "polyhead.lab.comparison.runs",
    "polyhead.planning",
    "polyhead.serving.http.batch",
    "polyhead.serving.http.server",
    "polyhead.viewer.page",
    "polyhead.interpret.trace.model",
    "rich.progress",
    "rich.table",
    # What typer and torch import when they are first used: half a second, and four.
    "typer._adapters",
    "tabulate",
    "torch._dynamo",
    "accelerate",
)


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """Asserts one clear sentence on stderr, an exit code, and no traceback."""
        assert self.code == code, self
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        for word in words:
            assert word in lines[0], self.err


Run = Callable[..., Result]
"""The fixture ``run``: arguments, ``stdin=`` bytes, ``stdout=`` a pipe, environment variables."""


def environment(**changes: str) -> dict[str, str]:
    """This process's, with one thread (the machine may be busy) and a plain terminal."""
    unwanted = ("COLUMNS", "FORCE_COLOR", "PYTHONUNBUFFERED", "POLYHEAD_DEBUG")
    base = {name: value for name, value in os.environ.items() if name not in unwanted}
    return base | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | changes


def run_forked(
    arguments: Sequence[str],
    folder: Path,
    streams: Path,
    stdin: bytes,
    stdout: Connection | None,
    changes: Mapping[str, str],
) -> Result:
    """Runs ``polyhead`` in ``folder``; ``streams`` is where its standard streams are kept.

    ``stdout`` is a pipe's end that takes the place of the file.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    (streams / "in").write_bytes(stdin)
    process = context.Process(
        target=_child,
        args=(list(arguments), str(folder), str(streams), stdout, environment(**changes)),
    )
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the command did not end"
    out, err = ((streams / name).read_bytes().decode() for name in ("out", "err"))
    return Result(process.exitcode, out, err)


def _child(
    arguments: list[str],
    folder: str,
    streams: str,
    stdout: Connection | None,
    variables: dict[str, str],
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (name, flags) in enumerate(
        (("in", os.O_RDONLY), ("out", writing), ("err", writing))
    ):
        file = os.open(os.path.join(streams, name), flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    if stdout is not None:
        os.dup2(stdout.fileno(), 1)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    encoding = variables.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, closefd=False, buffering=1)  # noqa: SIM115
    import torch

    from polyhead.cli import main

    torch.set_num_threads(1)
    sys.exit(main(arguments))
