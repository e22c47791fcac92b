"""``python -m fuzz``: see the package."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

from fuzz import __doc__ as description
from fuzz import harness, targets
from fuzz.worker import random_of

NAMES = sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m fuzz", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", nargs="*", help=f"of {', '.join(NAMES)}; all where none is named")
    parser.add_argument("--minutes", type=float, help="for each target (default: 1)")
    parser.add_argument("--cases", type=int, help="for each target, instead of a time")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--case", metavar="SEED:NUMBER", help="only this one, without limits")
    options = parser.parse_args()
    chosen: list[str] = options.target or NAMES
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"targets are {', '.join(NAMES)}: got {', '.join(sorted(unknown))}")
    if options.case is not None:
        return _one(chosen, options.case, parser)
    minutes = options.minutes if options.minutes or options.cases else 1.0
    seconds = None if minutes is None else 60 * minutes

    def failed(target: str, number: int, words: str) -> None:
        print(f"{target}: {words}\n  python -m fuzz {target} --case {options.seed}:{number}")
        sys.stdout.flush()

    broken = False
    modules = [f"fuzz.targets.{name}" for name in chosen]
    for report in harness.run(
        modules, options.seed, cases=options.cases, seconds=seconds, failed=failed
    ):
        print(report, flush=True)
        broken |= bool(report.failures)
    return int(broken)


def _one(chosen: list[str], case: str, parser: argparse.ArgumentParser) -> int:
    seed, colon, number = case.partition(":")
    if len(chosen) != 1 or not colon:
        parser.error("--case SEED:NUMBER goes with one target")
    target = importlib.import_module(f"fuzz.targets.{chosen[0]}")
    if hasattr(target, "prepare"):
        target.prepare()
    target.case(random_of(int(seed), int(number)))
    print("right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
