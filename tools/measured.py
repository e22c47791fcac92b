"""Runs of pytest in a child: once with coverage, to learn which test runs which line, then without.

What was measured stays in .mutation/, a pair of files for each file of tests, until that file, its
neighbours that are no tests, or what it ran of the package changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import copy_with, import_ahead, in_child, libraries

OPTIONS = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
MARKS = "not slow and not browser and not gpu"
MEASURING = 1800
"""Seconds that a file of tests may take while it is measured."""


@dataclass
class Measured:
    """The tests of one file: how long each took, and where the lines that it ran are listed."""

    file: Path
    seconds: dict[str, float]
    data: Path

    def covering(self, source: Path, lines: range | None) -> list[str]:
        """The tests that run one of these lines, fastest first; None: all."""
        import coverage

        found = set(self.seconds)
        if source.suffix == ".py" and lines is not None:
            data = coverage.CoverageData(basename=str(self.data))
            data.read()
            of = data.contexts_by_lineno(str(source))
            found &= {test for line, tests in of.items() if line in lines for test in tests}
        return sorted(found, key=lambda test: (self.seconds[test], test))


class Tests:
    """Tests of a tree, run on copies of its source."""

    def __init__(
        self, root: Path, scratch: Path, environment: dict[str, str], sources: list[Path]
    ) -> None:
        self.root, self.scratch, self.environment = root, scratch, environment
        self.sources = {str(path) for path in sources}
        self.cache = root / ".mutation"
        self.cache.mkdir(exist_ok=True)
        self._measured: dict[Path, Measured] = {}

    def files(self, path: str) -> list[Path]:
        place = self.root / path
        return [place] if place.suffix == ".py" else sorted(place.rglob("test_*.py"))

    def measured(self, file: Path, native: dict[Path, bytes]) -> Measured:
        """Which lines each test of a file runs; those that fail on the tree are left out."""
        if file in self._measured:
            return self._measured[file]
        parts = file.relative_to(self.root).with_suffix("").parts
        name = "-".join((*parts, "native") if native else parts)
        data, facts = self.cache / f"{name}.coverage", self.cache / f"{name}.json"
        known = json.loads(facts.read_text()) if facts.exists() else None
        beside = [p for p in file.parent.glob("*.py") if not p.name.startswith("test_")]
        own = digest([file, *sorted(beside)], str(self.environment))
        ran = known["sources"].items() if known else ()
        stale = any(path in self.sources and digest([Path(path)]) != was for path, was in ran)
        if not known or known["own"] != own or stale:
            data.unlink(missing_ok=True)
            work = lambda copy: self._measure(file, data, copy)  # noqa: E731
            known = self.on_copy(native, work, MEASURING)
            if not isinstance(known, dict):
                print(f"warning: {name} could not be measured ({known}) and is left out")
                known = {"seconds": {}, "failed": [], "sources": {}, "modules": []}
            else:
                facts.write_text(json.dumps(known | {"own": own}))
        if self.environment["TRITON_INTERPRET"] == "0":  # Triton reads it when it is imported
            import_ahead(known["modules"])
        for test in known["failed"]:
            print(f"warning: {test} fails without any change and is left out", flush=True)
        self._measured[file] = Measured(file, known["seconds"], data)
        return self._measured[file]

    def on_copy(self, changed: dict[Path, bytes], work: Any, seconds: float) -> Any:
        """What ``work`` finds in a child that imports polyhead from a copy with changed files."""
        import tempfile

        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            copy = Path(name) / "src"
            copy_with(self.root / "src", copy, changed)
            return in_child(lambda: self._set_up(copy) or work(Path(name)), Path(name), seconds)

    def _set_up(self, copy: Path) -> None:
        import hypothesis

        os.chdir(self.root)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **self.environment}
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(copy.parent / "hypothesis")
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copy))
        phases = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")]
        hypothesis.settings.register_profile(
            "mutation", derandomize=True, database=None, deadline=None, phases=phases
        )
        hypothesis.settings.load_profile("mutation")

    def _measure(self, file: Path, data: Path, copy: Path) -> dict[str, Any]:
        import coverage
        import pytest

        source = self.root / "src"
        watch = coverage.Coverage(str(data), include=[f"{source}/*"], config_file=False)
        watch.start()
        log = Log(watch)
        pytest.main(
            [*OPTIONS[:1], *OPTIONS[2:], "-m", MARKS, f"--basetemp={copy}/tmp", str(file)], [log]
        )
        watch.stop()
        watch.save()
        ran = watch.get_data().measured_files()
        return {
            "seconds": {t: round(s, 3) for t, s in log.seconds.items() if t not in log.failed},
            "failed": log.failed,
            "sources": {path: digest([Path(path)]) for path in sorted(ran)},
            "modules": libraries(),
        }

    def first_failure(
        self, chosen: dict[Path, list[str]], changed: dict[Path, bytes], seconds: float
    ) -> str | None:
        """The first test that fails on a copy, or how the tests ended; None where all pass."""

        def run(copy: Path) -> str:
            import pytest

            for file, tests in chosen.items():
                log = Log(order={test: i for i, test in enumerate(tests)})
                code = pytest.main(
                    [*OPTIONS, "-m", MARKS, f"--basetemp={copy}/tmp", str(file)], [log]
                )
                if log.failed or code not in (0, 5):
                    return (log.failed or [f"pytest ends with {code}"])[0]
            return ""

        return self.on_copy(changed, run, seconds) or None


class Log:
    """A plugin of pytest: chooses and orders tests, names them to coverage, keeps what happened."""

    def __init__(self, watch: Any = None, order: dict[str, int] | None = None) -> None:
        self.watch, self.order = watch, order
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if (order := self.order) is not None:
            items[:] = sorted(
                (i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid]
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.watch is not None:
            self.watch.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "skipped":
            self.seconds.pop(report.nodeid, None)
            return
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def digest(files: Iterable[Path], more: str = "") -> str:
    found = hashlib.sha256(more.encode())
    for file in files:
        found.update(file.read_bytes() if file.exists() else b"gone")
    return found.hexdigest()
