"""Cases of what a call takes beside its inputs: bytes, not seconds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from polyhead.lab.benchmarks.case import Call, Case, Contestant, Settings, close
from polyhead.lab.benchmarks.peers import torch_sdpa
from polyhead.lab.benchmarks.problem import Problem


def cases(settings: Settings) -> Iterator[Case]:
    """The most memory that a call takes, its result and torch's mask included (Linux only)."""
    if not MEASURED:
        return
    T = 2048 if settings.quick else 4096
    for dtype in settings.dtypes:
        plain = Problem(2, 2, T, T, 64, dtype, causal=True)
        variants = {
            "causal": plain,
            "window 512": replace(plain, window=512),
            "ALiBi": replace(plain, alibi=True),
            "latent decode, 128 heads": Problem(128, 1, 1, T, 576, dtype, causal=True, latent=512),
        }
        for name, problem in variants.items():
            yield _case(name, problem)


def _case(name: str, problem: Problem) -> Case:
    q, k, v = problem.draw()

    def theirs() -> object:
        run = torch_sdpa(problem, q, k, v)
        assert run is not None
        return run()

    return Case(
        name, problem.keys, problem.dtype, lambda: problem.ours(q, k, v),
        {"torch SDPA": Contestant(theirs, close(problem.dtype))},
        unit="", gauge=taken,
    )  # fmt: skip


_CLEAR = Path("/proc/self/clear_refs")
MEASURED = _CLEAR.exists()
"""Whether ``taken`` works on this machine."""


def taken(run: Call) -> float:
    """The most bytes by which this process grows during a call; at least the result's own bytes."""
    _give_back()
    held = _status("VmRSS")
    _CLEAR.write_text("5", encoding="utf-8")  # resets VmHWM
    result = run()
    return float(max(_status("VmHWM") - held, result.nbytes))


def _give_back() -> None:
    """Returns freed memory to the system, so that its reuse is measured too."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{name}:")[1].split()[0]) * 1024
