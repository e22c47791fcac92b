"""Cases of calls so small that only what surrounds the arithmetic counts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from polyhead import native
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Settings, close
from polyhead.lab.benchmarks.peers import torch_sdpa
from polyhead.lab.benchmarks.problem import Problem
from polyhead.native.arguments import KVSegment


def cases(settings: Settings) -> Iterator[Case]:
    """Tiny calls: what choosing and checking cost beside the compiled code alone and torch."""
    for dtype in settings.dtypes:
        for keys in (4, 160):
            yield _case(Problem(9, 3, 1, keys, 64, dtype))


def _case(problem: Problem, calls: int = 200) -> Case:
    q, k, v = problem.draw()
    theirs = torch_sdpa(problem, q, k, v)
    assert theirs is not None

    def many(run: Call) -> Tensor:
        for _ in range(calls):
            out: Tensor = run()
        return out

    peers = {"torch SDPA": Contestant(lambda: many(theirs), close(problem.dtype))}
    if (code := native.code()) is not None:
        scale = problem.head_dim**-0.5
        peers["the compiled code alone"] = Contestant(
            lambda: many(lambda: code.attend(q, [KVSegment(k, v)], scale)[0]), close(problem.dtype)
        )
    return Case(
        f"{calls} calls, 9/3 × 64, keys:", problem.keys, problem.dtype,
        lambda: many(lambda: problem.ours(q, k, v)), peers, work=calls, unit="calls/s",
    )  # fmt: skip
