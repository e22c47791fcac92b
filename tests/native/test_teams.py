"""Threads that compute together: what they share, and when they end."""

from __future__ import annotations

import os
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


COUNTED = r"""
#include <dlfcn.h>
static int started = 0;
extern "C" int teams_started() { return started; }
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags) {
    ++started;
    ((void (*)(void (*)(void*), void*, unsigned, unsigned))dlsym(RTLD_NEXT, "GOMP_parallel"))(run, data, threads, flags);
}
"""  # noqa: E501
DECODING = """
import ctypes, dataclasses, torch
import polyhead as ph
from generation.tiny import decoder
torch.set_num_threads(2)
started = ctypes.CDLL(None).teams_started
config = decoder().config
for layers in (2, 6):
    model = ph.Transformer(dataclasses.replace(config, layers=config.layers[:1] * layers)).eval()
    cache = model.new_cache()
    with torch.inference_mode():
        model(torch.ones(1, 4, dtype=torch.int64), cache=cache)
        for _ in range(3):
            before = started()
            model(torch.ones(1, 1, dtype=torch.int64), cache=cache)
            print(started() - before, end=" ")
"""


@pytest.mark.skipif(native.code() is None, reason="needs native code")
@pytest.mark.skipif(sys.platform != "linux", reason="puts a function before the runtime's")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile it")
def test_a_step_starts_as_many_teams_whatever_the_number_of_layers(tmp_path):
    source, counter = tmp_path / "counted.cpp", tmp_path / "counted.so"
    source.write_text(COUNTED, encoding="utf-8")
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(counter), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    places = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"LD_PRELOAD": str(counter), "PYTHONPATH": places}
    found = subprocess.run(
        [sys.executable, "-c", DECODING], env=environment, capture_output=True, text=True
    )
    counts = [*map(int, found.stdout.split())]
    assert counts[:3] == counts[3:], found.stderr
    assert len(counts) == 6
    assert min(counts) >= 1
