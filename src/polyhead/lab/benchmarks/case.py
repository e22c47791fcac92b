"""A piece of work, the ways of doing it, and when two results count as equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
Differs = Callable[[Any, Any], str | None]
Gauge = Callable[[Call], float]

# Largest difference relative to the largest element. Peers round scores, weights or partial sums.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Settings:
    """What the caller asked for.

    Attributes:
        quick: Fewer and smaller cases, less time on each.
        rounds: Turns of every case; None: as many as fit in a fixed time.
        device: Where cases lie, of those that are attention calls.
    """

    quick: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    rounds: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Contestant:
    """Another way of doing the work.

    Attributes:
        differs: Says how its result differs from ours, or None; None where it computes something
            else on purpose, such as our own attention without a feature.
        alike: The share of its result that is ours, where only some of it has to be.
    """

    run: Call
    differs: Differs | None
    alike: Callable[[Any, Any], float] | None = None


@dataclass(frozen=True)
class Limit:
    """What the machine does at best: a plain operation that is measured beside the work.

    Attributes:
        share: How much of it the work is: 2 if the work is twice as much.
    """

    kind: str
    name: str
    run: Call
    share: float

    def times(self, share: float) -> Limit:
        """The limit of ``share`` times as much work."""
        return replace(self, share=self.share * share)


class Wall(float):
    """Seconds of a call by the clock.

    Attributes:
        processor: Seconds of all its threads together.
    """

    processor: float

    def __new__(cls, seconds: float, processor: float) -> Wall:
        made = super().__new__(cls, seconds)
        made.processor = processor
        return made


def seconds(run: Call) -> float:
    """What one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(run: Call, calls: int = 10) -> float:
    """What one call takes on a GPU, of several that are launched one behind the other."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / calls


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        group: What it is but for its length; rows of one group are one line of the plot.
        length: The size that grows within the group: tokens, keys, heads.
        ours: polyhead's way, with the result that others are compared with.
        limits: What the machine does at best in each respect, bytes and operations; the one that
            takes longest binds. Empty where there is none to name.
        work: Operations, bytes or tokens of one call, for the rate.
        unit: Unit of the rate: "FLOP/s", "B/s", "tokens/s", "calls/s"; "" where the gauge is bytes.
        gauge: What is measured of a call: its seconds, or the bytes it takes.
        turns: Turns at least; None: as usual. Long calls need few.
    """

    group: str
    length: int
    dtype: torch.dtype
    ours: Call
    peers: Mapping[str, Contestant]
    limits: tuple[Limit, ...] = ()
    work: float = 0.0
    unit: str = "FLOP/s"
    gauge: Gauge = field(default=seconds)
    turns: int | None = None


def close(dtype: torch.dtype) -> Differs:
    """A test that says how two results differ, if by more than rounding to the dtype explains."""

    def differs(ours: Tensor, theirs: Tensor) -> str | None:
        if ours.shape != theirs.shape:
            return f"shape {list(theirs.shape)}, ours {list(ours.shape)}"
        scale = ours.float().abs().max().item()
        error = (ours.float() - theirs.float()).abs().max().item()
        if error <= _TOLERANCE[dtype] * scale:  # also catches NaN
            return None
        return f"greatest difference {error:.1e} where the greatest number is {scale:.1e}"

    return differs
