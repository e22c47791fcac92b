"""The fuzz harness tells its outcomes apart, and no target fails on a short slice of its cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import harness

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
import ctypes, random, time
from polyhead.errors import InputError

kept = []

def case(source: random.Random) -> None:
    kind = source.randrange(8)
    if kind == 0:
        raise InputError("text must be a str: got 3")
    if kind == 1:
        int("x")
    elif kind == 2:
        {}[1]
    elif kind == 3:
        ctypes.string_at(8)
    elif kind == 4:
        time.sleep(9)
    elif kind == 5:
        kept.append(b"x" * (400 << 20)); kept.clear()
    elif kind == 6:
        bytearray(800 << 20)
"""


@pytest.mark.slow
def test_harness_tells_crashes_hangs_growth_and_raw_errors_from_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_target.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(harness, "MOST_SECONDS", 0.5)
    # Under this seed the cases are of all eight kinds, once each: a worker takes seconds to start.
    (report,) = harness.run(["bad_target"], 2784, cases=8)
    found = " ".join(words for _, words in report.failures)
    assert len(report.failures) == 6
    for words in (
        "ValueError comes from inside",
        "KeyError is no PolyheadError",
        "the process ended: SIGSEGV",
        "ran for more than 0.5 s",
        "memory grew by ",
        "MemoryError is no PolyheadError",
    ):
        assert words in found
    assert report.counts == {"failure": 6, "sentence": 1, "right": 1}


def test_no_target_fails_on_a_short_slice() -> None:
    command = [sys.executable, "-m", "fuzz", "--cases", "20", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout
