"""Runs the cases of a target in a worker under its limits, and counts what becomes of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.worker import Answer, work

MOST_SECONDS = 5.0
"""A case that keeps the processor longer hangs, or one that sleeps ``_PATIENCE`` times as long:
other work on the machine makes every case take longer."""
_PATIENCE = 6
_MOST_TO_PREPARE = 120.0
_ENOUGH_FAILURES = 10


@dataclass
class Report:
    """What became of a target's cases.

    Attributes:
        target: Its name.
        counts: Cases by outcome.
        failures: A case number and what happened, one of each place.
        slowest: Seconds of the slowest case that ended, and its number.
    """

    target: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, 0)

    def __str__(self) -> str:
        total = sum(self.counts.values())
        counts = ", ".join(f"{self.counts[name]:,} {name}" for name in ("right", "sentence"))
        return (
            f"{self.target}: {total:,} cases: {counts}, {self.counts['failure']:,} failures; "
            f"slowest {self.slowest[0]:.2f} s (case {self.slowest[1]})"
        )


class Worker:
    """A worker that is started again after a case that ended it.

    Args:
        seed: Of all cases.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._start()

    def prepare(self, module: str) -> None:
        """Makes the following cases those of a module.

        Raises:
            RuntimeError: It cannot be imported, or its ``prepare`` fails.
        """
        self._module = module
        self._pipe.send(module)
        with suppress(EOFError, ConnectionError):
            if self._pipe.poll(_MOST_TO_PREPARE) and self._pipe.recv() == "ready":
                return
        self.close()
        raise RuntimeError(f"{module} could not be prepared")

    def answer(self, number: int) -> Answer:
        """Runs a case; a crash and a hang are answers too."""
        self._pipe.send(number)
        try:
            if self._hangs():
                self._restart()
                return Answer("failure", f"ran for more than {MOST_SECONDS:g} s", "hang")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            self._restart()
            return Answer("failure", f"the process ended: {how}", f"end by {how}")
        assert isinstance(answer, Answer)
        if answer.place == "memory":
            self._restart()
        return answer

    def _hangs(self) -> bool:
        """Waits for an answer; true where there will be none."""
        before = self._busy()
        for _ in range(_PATIENCE):
            if self._pipe.poll(MOST_SECONDS):
                return False
            if self._busy() - before >= MOST_SECONDS:
                break
        return not self._pipe.poll(0)

    def _busy(self) -> float:
        """Seconds for which the worker has kept the processor."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, which the pipe tells
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        arguments = (self._seed, self._folder.name, theirs)
        self._process = self._context.Process(target=work, args=arguments)
        self._process.start()
        theirs.close()

    def _end(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _restart(self) -> None:
        self._end()
        self._start()
        self.prepare(self._module)


def run(
    modules: Sequence[str],
    seed: int,
    *,
    cases: int | None = None,
    seconds: float | None = None,
    failed: Callable[[str, int, str], None] = lambda target, number, words: None,
) -> Iterator[Report]:
    """Runs each target until it has had its cases or its time, or fails at many places.

    Args:
        modules: The targets' modules, one after the other in one worker.
        seed: Cases are numbered from 0 under it.
        cases: How many of each; None: no limit.
        seconds: How long each; None: no limit.
        failed: Told the target, the case and what happened, the first time at each place.

    Yields:
        What became of each target.
    """
    worker = Worker(seed)
    try:
        for module in modules:
            worker.prepare(module)
            report, places = Report(module.rpartition(".")[2]), set[str]()
            began = time.monotonic()
            for number in itertools.count():
                late = seconds is not None and time.monotonic() - began > seconds
                if number == cases or late or len(places) == _ENOUGH_FAILURES:
                    break
                answer = worker.answer(number)
                report.counts[answer.outcome] += 1
                report.slowest = max(report.slowest, (answer.seconds, number))
                if answer.outcome == "failure" and answer.place not in places:
                    places.add(answer.place)
                    report.failures.append((number, f"{answer.words} [{answer.place}]"))
                    failed(report.target, *report.failures[-1])
            yield report
    finally:
        worker.close()
