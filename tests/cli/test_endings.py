"""A run that is cut short: Ctrl-C, a closed pipe, a full disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process import Run, environment

COMMAND = [sys.executable, "-m", "polyhead.cli"]
LONG = ("--max-new-tokens", "60", "--temperature", "1.5", "--seed", "1")


@pytest.fixture(autouse=True)
def _interrupts_reach_children() -> Iterator[None]:
    """A shell starts its background jobs with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _start(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, env=environment()
    )


@pytest.mark.model
def test_interrupted_generation_keeps_what_was_written(smollm2: str) -> None:
    process = _start("generate", "Once upon a time", "--model", smollm2, "-n", "2000", *LONG[2:])
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 20
    assert (first + rest).endswith(b"\n")
    (first + rest).decode("utf-8")
    assert b"Traceback" not in err
    assert b"tokens/s" in err
    assert b"ended by" not in err


def test_interrupt_while_a_model_is_loaded_is_quiet(tiny: str) -> None:
    script = (
        "import sys, polyhead.cli, polyhead.generation.pipelines.loading as loading, time\n"
        "def load_checkpoint(*_, **__): print('loading', flush=True); time.sleep(60)\n"
        "loading.load_checkpoint = load_checkpoint\n"
        f"sys.exit(polyhead.cli.main(['generate', 'Hello', '--model', {tiny!r}]))"
    )
    process = subprocess.Popen(
        [COMMAND[0], "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("verb", ["generate", "doctor", "look", "--version"])
def test_closed_pipe_ends_quietly(run: Run, tiny: str, tmp_path: Path, verb: str) -> None:
    arguments = {
        "generate": ("Hello", "--model", tiny, *LONG),
        "doctor": (),
        "--version": (),
        "look": ("one two", "--model", tiny, "--out", str(tmp_path / "page.html")),
    }[verb]
    reader, writer = multiprocessing.Pipe(duplex=False)
    reader.close()
    with writer:
        done = run(verb, *arguments, stdout=writer)
    assert (done.code, done.err) == (141, "")


def test_closed_pipe_is_not_written_to_at_the_very_end(tiny: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = _start("trace", "Hello " * 10, "--model", tiny, "--json", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 141
    assert err == b""


def test_reader_that_takes_one_line_gets_it(tiny: str) -> None:
    process = _start("trace")
    head = subprocess.run(["head", "-1"], stdin=process.stdout, capture_output=True, check=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert head.stdout.decode().startswith("Multi-head attention")
    assert process.returncode in (0, 141)  # 0: all of it fitted into the pipe's buffer
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_full_disk_is_told_once() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [*COMMAND, "trace"], stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60
        )
    assert process.returncode == 1
    lines = process.stderr.decode().strip().splitlines()
    assert len(lines) == 1
    assert "no space left" in lines[0].lower()


def test_closed_standard_output_is_no_traceback() -> None:
    command = f'exec "{COMMAND[0]}" -m polyhead.cli trace >&-'
    process = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, env=environment(), timeout=60
    )
    assert b"Traceback" not in process.stderr


def test_terminal_without_mathematics_still_gets_numbers(tmp_path: Path) -> None:
    process = subprocess.run(
        [*COMMAND, "trace"],
        capture_output=True,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C"),
        timeout=60,
    )
    assert process.returncode == 0
    shown = process.stdout.decode("ascii")
    assert "?" not in shown
    assert (
        """\
  word 1 [ 1  0  1  0 ]   [ 1  0 ]   [ 2  0 ]
  word 2 [ 0  1  0  1 ] * [ 0  1 ] = [ 0  2 ]
  word 3 [ 1  1  0  0 ]   [ 1  0 ]   [ 1  1 ]
                          [ 0  1 ]
  first number: 1*1 + 0*0 + 1*1 + 0*0 = 2
"""
        in shown
    )
    assert "S1 = Q1 * K1^T / sqrt 2   [3 x 3]" in shown
