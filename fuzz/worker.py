"""The process that runs cases: a crash, a hang or a full memory ends it and nothing else."""

from __future__ import annotations

import importlib
import random
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from fuzz.verdict import flaw, place

MOST_GROWTH = 300 << 20
"""Bytes of resident memory that one case, or all cases of a worker together, may add."""
_ADDRESS_SPACE = 512 << 20
"""Bytes of address space beyond what the target took to prepare: allocations over it fail."""


@dataclass(frozen=True)
class Answer:
    """What became of a case.

    Attributes:
        outcome: ``"right"``, ``"sentence"`` or ``"failure"``.
        words: The error's, and why it is a failure.
        place: Where it was raised.
        seconds: How long the case kept the processor.
    """

    outcome: str
    words: str = ""
    place: str = ""
    seconds: float = 0.0


def random_of(seed: int, number: int) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f"{seed}:{number}")


def work(seed: int, folder: str, pipe: Connection) -> None:
    """Answers a module's name with ``"ready"``, and then numbers with the ``Answer`` of that case.

    Args:
        seed: Of all cases.
        folder: Where files go.
        pipe: To the harness; the worker ends when it is closed.
    """
    tempfile.tempdir = folder
    target, at_first = None, 0
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if isinstance(asked, str):
            target, at_first = _prepared(asked, seed), _status("VmRSS")
            pipe.send("ready")
        else:
            assert target is not None
            pipe.send(_run(target.case, random_of(seed, asked), at_first))


def _prepared(module: str, seed: int) -> ModuleType:
    """A target that has made what it needs, under the limit of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    target = importlib.import_module(module)
    if hasattr(target, "prepare"):
        target.prepare()
    with suppress(BaseException):  # what is imported at first use is imported now
        target.case(random_of(seed, -1))
    most = _status("VmSize") + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    return target


def _run(case: Callable[[random.Random], None], source: random.Random, at_first: int) -> Answer:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = _status("VmRSS"), time.process_time()
    outcome, words, where = "right", "", ""
    try:
        case(source)
    except BaseException as error:
        outcome, words = "sentence", str(error)
        if (why := flaw(error)) is not None:
            outcome, where = "failure", place(error)
            words = f"{why}: {type(error).__name__}: {words[:500]}"
    seconds = time.process_time() - began
    grown, kept = _status("VmHWM") - before, _status("VmRSS") - at_first
    if max(grown, kept) > MOST_GROWTH:
        what = f"{grown >> 20} MiB in this case, {kept >> 20} MiB in all cases"
        return Answer("failure", f"memory grew by {what}", "memory", seconds)
    return Answer(outcome, words, where, seconds)


def _status(name: str) -> int:
    """A size in bytes from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")
