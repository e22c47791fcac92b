"""Draws small changes of a package and counts those that the tests notice.

    python tools/mutation.py --package caches --number 50 --seed 3

Prints a line for each change and the rate; exit code 1 if less than ``--least`` percent are caught.
A change is tried on the tests that run its line, fastest first, those of the package's own folder
before others, until one fails or ``--seconds`` of tests have passed; what runs at import, on those
that run a line of its file and then on all of the own folder; what no test runs itself, on all.
``csrc`` is compiled anew for each change, for this processor alone and without the test at first
use, which would switch it off; ``kernels/triton`` is interpreted, which takes Triton. Survivors
that change nothing observable are listed in equivalent.toml with the reason, and count as neither.

The tree is not touched: each change is in a copy of links to it, in a temporary directory.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from random import Random

from changes import Change, draw
from children import end_all
from compiled import Compiled
from measured import Tests

ROOT = Path(__file__).parents[1]
TRITON = "kernels/triton"
TESTS = {
    "caches": [
        "caches",
        "test_odd_paths.py",
        "kernels/test_specifications_through_caches.py",
        "generation/test_search.py",
        "layers/test_step_caches.py",
        "test_same_bits.py",
    ],
    "config": ["config", "checkpoints/test_config_json.py", "planning", "layers", "models"],
    "checkpoints": ["checkpoints", "families", "generation"],
    "conversion": ["conversion"],
    "csrc": [
        *(f"kernels/test_native{part}.py" for part in ("_codes", "", "_gradients", "_gate")),
        "kernels/test_random_calls.py",
        *(f"kernels/test_recurrence{part}.py" for part in ("", "_native")),
        *(f"semantics/test_{name}.py" for name in ("chosen", "block_sparse")),
        *(
            f"layers/test_{name}.py"
            for name in ("fused", "linear", "quantized_layers", "int8_activations")
        ),
        "quantization",
        *(
            f"layers/test_step{part}.py"
            for part in ("", "_caches", "_choices", "_experts", "_rows")
        ),
        "kernels/test_one_query.py",
        "kernels/test_choosing.py",
        "models/test_layer_runs.py",
        "interpret/test_statistics.py",
    ],
    "families/common": ["families", "checkpoints"],
    "generation": ["generation"],
    "interpret": ["interpret", "generation/test_speech_to_text.py"],
    "kernels": ["kernels", "semantics", "test_same_bits.py", "test_same_bits_gradients.py"],
    "layers": ["layers", "models", "checkpoints/test_parity_families.py"],
    "models": [
        *("models", "layers", "generation"),
        *("training/test_loss.py", "checkpoints/test_gguf_quantized.py"),
    ],
    "planning": ["planning", "cli/test_plan.py", "checkpoints/test_coded.py"],
    "quantization": ["quantization", "layers/test_quantized_layers.py"],
    "semantics": ["semantics", "kernels", "caches", "test_notebook.py", "test_pages.py"],
    "training": [
        *("training", "test_evaluation.py"),
        *("cli/test_train.py", "cli/test_perplexity.py", "lab/test_training.py"),
    ],
    "lab": ["lab", "cli/test_bench.py", "cli/test_compare.py"],
    "viewer": ["viewer", "cli/test_look.py", "cli/test_learn.py"],
    TRITON: ["kernels/test_triton.py"],
}
"""Tests of a package, its own first; another package has the folder of its name."""


@dataclass
class Trial:
    """Runs the tests that may notice a change."""

    tests: Tests
    places: list[str]
    native: Compiled | None
    seconds: float

    def __post_init__(self) -> None:
        self.measuring = threading.Lock()
        self.sound: dict[str, bool] = {}

    def verdict(self, change: Change) -> tuple[str, str] | None:
        """A word and what caught the change; None if it is none to the compiler."""
        changed = {change.path: change.text.encode()}
        base: dict[Path, bytes] = {}
        if self.native is not None:
            built = self.native.built(changed)
            if built is None:
                return None
            base, changed = self.native.unchanged(), built
        left, tried = self.seconds, set[str]()
        for places, lines in self.rounds(change, tried):
            chosen: dict[Path, list[str]] = {}
            spent = 0.0
            with self.measuring:
                files = [file for place in places for file in self.tests.files(place)]
                found = [self.tests.measured(file, base) for file in files]
                covering = [(m, m.covering(change.path, lines)) for m in found]
            for m, names in sorted(covering, key=lambda c: sum(c[0].seconds[t] for t in c[1])):
                new = [t for t in names if t not in tried]
                fit = [t for t in new if (spent := spent + m.seconds[t]) <= left]
                if fit:
                    chosen[m.file] = fit
                    tried |= {*fit}
            left -= spent
            if chosen and (test := self.failure(chosen, changed, base)):
                return "caught", test
        return "SURVIVES", f"{len(tried)} tests" if tried else "no test runs it"

    def rounds(self, change: Change, tried: set[str]) -> Iterator[tuple[list[str], range | None]]:
        """Places of tests, and the lines that those to try have to run; None: whatever they run."""
        if self.native is not None:  # nobody knows which test runs a line: the cheapest first
            yield self.places, None
            return
        yield from (([place], change.covered) for place in self.places)
        if 0 in change.covered:
            yield self.places[:1], None
        elif not tried:  # perhaps a process that a test starts runs it
            yield from (([place], None) for place in self.places)

    def failure(self, chosen: dict, changed: dict, base: dict) -> str | None:
        """The first failure that the same test does not show without the change."""
        while test := self.tests.first_failure(chosen, changed, 30 + 4 * self.seconds):
            file = next((file for file, names in chosen.items() if test in names), None)
            if file is None:
                return test  # no end, a crash, an error at import
            if test not in self.sound:
                self.sound[test] = not self.tests.first_failure({file: [test]}, base, 600)
            if self.sound[test]:
                return test
            print(f"warning: {test} fails alone without any change and is left out", flush=True)
            chosen = {f: [t for t in names if t != test] for f, names in chosen.items()}
        return None


def sources(root: Path, package: str) -> list[Path]:
    if package == "csrc":
        return sorted([*(root / "csrc").rglob("*.h"), root / "csrc/module/module.cpp"])
    place = root / "src/polyhead" / package
    found = [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))
    if not found or not found[0].exists():
        raise SystemExit(f"--package {package!r} is not a folder or a file under src/polyhead")
    apart = root / "src/polyhead" / TRITON
    return [path for path in found if package == TRITON or apart not in path.parents]


def equivalents(package: str) -> set[tuple[str, str]]:
    """The changes, as texts before and after, that a person found to change nothing observable."""
    listed = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text(encoding="utf-8"))
    return {(e["line"], e["changed"]) for e in listed["equivalent"] if e["package"] == package}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", nargs="+", default=list(TESTS), help="default: all in turn")
    parser.add_argument("--number", type=int, default=20, help="changes to draw of each (20)")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="(the date's)")
    parser.add_argument(
        "--seconds", type=float, help="of tests for a change (60; of C++ and Triton 300)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="changes tried at once (1)")
    parser.add_argument("--least", type=float, default=0, help="percent that must be caught (0)")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    lines = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        try:
            for package in sorted(asked.package, key=lambda name: name != TRITON):
                lines.append(one_package(package, asked, Path(scratch), pool))
                print(lines[-1][1], flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
    if len(lines) > 1:
        print(*(line for _, line in lines), sep="\n")
    return any(rate < asked.least for rate, _ in lines)


def one_package(
    package: str, asked: argparse.Namespace, scratch: Path, pool: ThreadPoolExecutor
) -> tuple[float, str]:
    """Draws and tries changes of one package: the percent that are caught, and the last line."""
    if package == TRITON and find_spec("triton") is None:
        return 100.0, f"{package}: nothing is tried, since Triton is not installed"
    root = asked.root.resolve()
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {"TRITON_INTERPRET": str(int(package == TRITON))}
    files = sources(root, package)
    tests = Tests(root, scratch, environment, files)
    native = Compiled(root, tests.cache) if package == "csrc" else None
    places = [f"tests/{place}" for place in TESTS.get(package, [package])]
    slow = native is not None or package == TRITON  # compiled anew, or interpreted
    seconds = asked.seconds or (300.0 if slow else 60.0)
    trial, known = Trial(tests, places, native, seconds), equivalents(package)
    changes = draw(files, Random(asked.seed))
    counts = Counter[str]()
    while some := list(islice(changes, asked.number - counts.total())):
        for change, found in attempts(pool, trial, some, known):
            if found is not None:
                word, why = found
                counts[word] += 1
                place = f"{change.path.relative_to(root)}:{change.line}"
                print(
                    f"{word:10} {place}  {change.before}  ->  {change.after}  [{why}]", flush=True
                )
    tried = counts["caught"] + counts["SURVIVES"]
    rate = 100 * counts["caught"] / max(1, tried)
    return rate, (
        f"{package}, seed {asked.seed}: {counts.total()} drawn, {counts['caught']} of {tried} "
        f"caught ({rate:.0f} %), {counts['equivalent']} equivalent"
    )


def attempts(
    pool: ThreadPoolExecutor, trial: Trial, changes: list[Change], known: set[tuple[str, str]]
) -> Iterator[tuple[Change, tuple[str, str] | None]]:
    started: list[tuple[Change, Future | None]] = [
        (c, None if (c.before, c.after) in known else pool.submit(trial.verdict, c))
        for c in changes
    ]
    for change, future in started:
        yield change, ("equivalent", "equivalent.toml") if future is None else future.result()


if __name__ == "__main__":
    sys.exit(main())
