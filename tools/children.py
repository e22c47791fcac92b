"""Processes that run tests: forks of one that has imported what tests need, but not polyhead."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

COLD = {"polyhead", "triton"}
"""Parts of names that are not imported ahead: what is tested, and what a test may look for."""
_groups: set[int] = set()
_ended: list[bool] = []


def in_child(work: Callable[[], Any], folder: Path, seconds: float) -> Any:
    """What ``work`` returns, computed in a fork; or as text what ended it.

    ``seconds`` limit the processor's time, whatever else the machine does; ten times as much may
    pass on the clock. Output goes to folder/output.txt; the child's own children end with it.
    """
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    if _ended:
        raise SystemExit("stopped")
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            answer.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    _groups.add(child)
    deadline = time.monotonic() + 10 * seconds
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                return "no end"
            time.sleep(0.02)
    finally:
        end_group(child)
    if answer.exists():
        return json.loads(answer.read_text())
    number = os.waitstatus_to_exitcode(ended[1])
    return "no end" if -number in (signal.SIGXCPU, signal.SIGKILL) else f"exit {number}"


def end_group(child: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have come to make its group
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    _groups.discard(child)


def end_all() -> None:
    """Ends all children, and lets none begin."""
    _ended.append(True)
    for child in list(_groups):
        end_group(child)


def libraries() -> list[str]:
    """The installed modules that this process has imported."""
    places = (sys.prefix, sys.base_prefix)
    files = {name: getattr(m, "__file__", None) or "" for name, m in sys.modules.items()}
    return [n for n, f in files.items() if f.startswith(places) and COLD.isdisjoint(n.split("."))]


def import_ahead(names: Iterable[str]) -> None:
    """Imports libraries here, so that no child has to."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def copy_with(source: Path, target: Path, changed: dict[Path, bytes]) -> None:
    """A folder that looks like ``source`` with other contents of some files: links to the rest."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry in changed:
            (target / entry.name).write_bytes(changed[entry])
        elif entry.name == "__pycache__" or any(entry in path.parents for path in changed):
            copy_with(entry, target / entry.name, changed)
        else:
            (target / entry.name).symlink_to(entry)
