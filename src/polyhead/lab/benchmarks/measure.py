"""One case, measured: results compared first, then every way in turns, medians and quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyhead.errors import DisagreementError
from polyhead.lab.benchmarks.case import (
    Call,
    Case,
    Gauge,
    Limit,
    Settings,
    Wall,
    device_seconds,
    seconds,
)

OURS = "polyhead"
_LIMIT = "limit: "
# Seconds for the turns of a case, and how many turns at least and at most: full run, quick run.
_BUDGET = {False: (1.5, 5, 31), True: (0.25, 3, 9)}


@dataclass(frozen=True)
class Sample:
    """What one way took, turn by turn, in seconds or bytes."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these lies the middle half of the turns."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def processor(self) -> float | None:
        """Median of the processor's seconds, where they were measured."""
        found = [each.processor for each in self.values if isinstance(each, Wall)]
        return statistics.median(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        found = {
            "median": self.median,
            "quartiles": list(self.quartiles),
            "turns": len(self.values),
        }
        return found if self.processor is None else found | {"processor": self.processor}


@dataclass(frozen=True)
class Result:
    """What was measured of a case.

    Attributes:
        case: The case, without the ways of doing it: they hold tensors and models.
        limit: What the machine would take for this work at best, or None.
        bound: The limit that this is: of several the one that takes longest.
        alike: The share of a peer's result that is ours, where only some of it has to be.
    """

    case: Case
    ours: Sample
    peers: Mapping[str, Sample]
    limit: Sample | None
    bound: Limit | None
    alike: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Median of each peer over our median: above 1, polyhead is ahead."""
        return {name: sample.median / self.ours.median for name, sample in self.peers.items()}

    @property
    def processor_ratios(self) -> dict[str, float]:
        """The same of the processor's seconds, where they were measured."""
        ours = self.ours.processor
        return {
            name: sample.processor / ours
            for name, sample in self.peers.items()
            if ours and sample.processor is not None
        }

    @property
    def of_limit(self) -> float | None:
        """The fraction of the machine's best that polyhead reaches."""
        return None if self.limit is None else self.limit.median / self.ours.median

    def rate(self, sample: Sample) -> float:
        """Work per second."""
        return self.case.work / sample.median


def measure(case: Case, settings: Settings) -> Result:
    """Compares the results of a case, then measures every way of doing it in turns."""
    expected, alike = case.ours(), {}
    for name, peer in case.peers.items():
        found = peer.run()
        if peer.differs is not None and (why := peer.differs(expected, found)) is not None:
            raise DisagreementError(
                f"{case.group}, {case.length}, {case.dtype}: {name} and polyhead disagree: {why}"
            )
        if peer.alike is not None:
            alike[name] = peer.alike(expected, found)
    runs: dict[Any, Call] = {OURS: case.ours}
    runs |= {name: peer.run for name, peer in case.peers.items()}
    runs |= {_LIMIT + limit.kind: limit.run for limit in case.limits}
    samples = {name: Sample(tuple(taken)) for name, taken in _turns(runs, case, settings).items()}
    limits = [
        (Sample(tuple(x * limit.share for x in samples.pop(_LIMIT + limit.kind).values)), limit)
        for limit in case.limits
    ]
    sample, bound = max(limits, key=lambda pair: pair[0].median, default=(None, None))
    case = _without_runs(case)
    bound = bound and replace(bound, run=_done)
    return Result(case, samples.pop(OURS), samples, sample, bound, alike)


def _without_runs(case: Case) -> Case:
    return replace(case, ours=_done, peers={}, limits=())


def _done() -> Any:
    raise RuntimeError("this case has been measured")


def _turns(runs: dict[Any, Call], case: Case, settings: Settings) -> dict[Any, list[float]]:
    """Every way in turns, so that all meet the same noise; each was run once before, or is here."""
    taken: dict[Any, list[float]] = {name: [] for name in runs}
    for limit in case.limits:
        limit.run()
    budget, least, most = _BUDGET[settings.quick]
    least = case.turns or least
    if case.gauge not in (seconds, device_seconds):  # bytes are the same in every turn, or nearly
        budget, least = 0.0, case.turns or 2
    least, most = (settings.rounds, settings.rounds) if settings.rounds else (least, most)
    end = time.perf_counter() + budget
    turn = 0
    while turn < least or (turn < most and time.perf_counter() < end):
        for name, run in runs.items():
            gauge: Gauge = case.gauge
            taken[name].append(gauge(run))
        turn += 1
    return taken
