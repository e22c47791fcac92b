"""Runs the real command with a tiny model or a trained one."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from process import Result, Run, run_forked


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs ``polyhead`` with arguments in the empty directory ``tmp_path``."""
    streams = tmp_path_factory.mktemp("streams")

    def run(
        *arguments: str | bytes,
        stdin: bytes = b"",
        stdout: Connection | None = None,
        **changes: str,
    ) -> Result:
        words = [os.fsdecode(argument) for argument in arguments]
        return run_forked(words, tmp_path, streams, stdin, stdout, changes)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny random Llama: 2 layers, 4 heads, a token per byte, context 96."""
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
