"""Runs the real command in a process of its own, with a tiny model or a trained one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))

COMMAND = [sys.executable, "-m", "polyhead.cli"]


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
        assert "Traceback" not in self.err


Run = Callable[..., Result]


def environment(**changes: str) -> dict[str, str]:
    """This process's, with one thread (the machine may be busy) and neither colours nor a width."""
    base = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    return base | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | changes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs ``polyhead`` with arguments in an empty directory."""

    def run(*arguments: str | bytes, stdin: bytes = b"", **changes: str) -> Result:
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            cwd=tmp_path,
            env=environment(**changes),
            timeout=240,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny random Llama directory: 2 layers, 4 heads, one token per byte, 96 tokens."""
    from tiny import write_decoder

    return str(write_decoder(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of the trained model, where its package is installed."""
    from polyhead.checkpoints import available

    state = next(state for state in available() if state.model.name == "smollm2")
    if not state.found:
        pytest.skip(f"smollm2 is not installed: {state.model.install}")
    return "smollm2"
