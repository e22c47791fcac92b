"""``polyhead serve`` in two processes that share one model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served_tiny import post
from test_processes import ENDING, TEXTS, Client, body, port_of, whole
from tiny import write_decoder

import polyhead as ph
from polyhead.serving import grammars

Started = tuple[list["subprocess.Popen[str]"], int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("tiny"), context=100_000)


@contextmanager
def sharing(folder: Path, *, torchrun: bool) -> Iterator[Started]:
    """Processes, torchrun's alone or those of both ranks, and the port of the first rank."""
    serve = "-m", "polyhead.cli", "serve", str(folder), "--port", "0", "--max-tokens", "200000"
    run = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":  # whatever other networks the machine has or has not
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    ranks: list[dict[str, str]] = [{}]
    if not torchrun:
        ranks = [{"WORLD_SIZE": "2", "RANK": f"{rank}", **place} for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, *(run if torchrun else ()), *serve], stderr=subprocess.PIPE,
            text=True, env=settings | rank,
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        yield processes, port_of(processes[0])
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=60)  # its children too have ended


def text(port: int, **options: Any) -> str:
    status, found = post(port, TEXTS, body("One of two", max_tokens=24, **options))
    assert status == 200, found
    made: str = found["choices"][0]["text"]
    return made


def test_processes_of_torchrun_answer_as_one(folder: Path) -> None:
    with sharing(folder, torchrun=True) as ((process,), port):
        one = ph.load(str(folder))
        alone = one.generate("One of two", max_new_tokens=24).text
        assert text(port) == alone
        drawn = {"temperature": 1.0, "seed": 5}
        assert text(port, **drawn) == text(port, **drawn) != alone
        wanted = {f"{token}": 100 for token in one.tokenizer.encode("ab")}
        assert set(text(port, logit_bias=wanted)) <= {"a", "b"}
        if grammars.installed():
            schema = {"enum": ["yes", "no"]}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            asked = {"messages": [{"role": "user", "content": "Is it?"}], "response_format": form}
            status, found = post(port, "/v1/chat/completions", asked)
            assert status == 200, found
            assert found["choices"][0]["message"]["content"] in ('"yes"', '"no"')
        stream = Client(port, body(max_tokens=40, stream=True)).begun()
        process.send_signal(signal.SIGTERM)
        said = stream.said()
        assert "data: [DONE]" in said
        assert whole(said)
        process.communicate(timeout=40)  # all processes have closed what they write to


@pytest.mark.slow
def test_the_end_of_the_first_process_is_that_of_the_others(folder: Path) -> None:
    with sharing(folder, torchrun=False) as ((first, other), port):
        assert text(port)
        other.send_signal(signal.SIGTERM)  # as torchrun sends it to all
        stream = Client(port, body(max_tokens=40, stream=True)).begun()
        first.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in stream.said()
        assert [each.wait(20) for each in (first, other)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
def test_a_process_that_is_killed_ends_the_others(folder: Path, busy: bool) -> None:
    with sharing(folder, torchrun=False) as ((first, other), port):
        stream = Client(port, body(max_tokens=90_000, stream=True)).begun() if busy else None
        other.kill()
        began = time.monotonic()
        if stream is not None:
            said = stream.said()
            assert ENDING in said
            assert "[DONE]" not in said
        _, told = first.communicate(timeout=30)
        assert time.monotonic() - began < 20
        assert first.returncode == 2
        assert "rank 1 is gone" in told.splitlines()[-1]


@pytest.mark.slow
def test_a_first_process_that_is_killed_ends_the_others(folder: Path) -> None:
    with sharing(folder, torchrun=False) as ((first, other), port):
        assert text(port)
        first.kill()
        _, told = other.communicate(timeout=30)
        assert other.returncode == 2
        assert "rank 0 is gone" in told.splitlines()[-1]
