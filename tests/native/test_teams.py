"""Threads that compute together: what they share, and when they end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from polyhead import native
from polyhead.native.threads import end_team

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the program")
@pytest.mark.parametrize("sanitizer", ["", pytest.param("thread", marks=pytest.mark.slow)])
def test_every_thread_of_a_team_computes_and_waits(tmp_path, sanitizer):
    program = tmp_path / "teams"
    flags = ["-std=c++17", "-O1", "-Wno-psabi", "-pthread", f"-I{ROOT / 'csrc'}"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    source = str(Path(__file__).with_name("teams.cpp"))
    subprocess.run(["g++", *flags, source, "-o", str(program)], check=True, capture_output=True)
    found = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (found.stdout, found.returncode) == ("teams\n", 0), found.stderr


@pytest.mark.skipif(native.code() is None, reason="needs native code")
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process")
def test_a_thread_that_waits_ends_its_team():
    x, weight = torch.randn(8, 16, 512), torch.randn(16, 512, 512)
    found = []

    def tasks():
        return [*Path("/proc/self/task").iterdir()]

    def compute():
        before = len(tasks())
        product = native.code().head_product(x, weight, summed=True)
        more = len(tasks()) - before
        end_team()
        found.append((more, len(tasks()) - before, product))
        found.append((0, 0, native.code().head_product(x, weight, summed=True)))

    threads_before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(threads_before)
    (more, left, product), (_, _, again) = found
    assert (more, left) == (2, 0)
    assert torch.equal(product, again)
