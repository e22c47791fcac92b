"""What was measured on one CPU or GPU, as a section of Markdown for ``docs/performance.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from polyhead.lab.benchmarks.measure import Result
from polyhead.lab.benchmarks.results import dtype_name, means
from polyhead.lab.benchmarks.routines import ROUTINES


def section(
    found: Mapping[str, Sequence[Result]], report: Mapping[str, Any], *, command: str, day: str
) -> str:
    """A heading, what the processor does at most, and a table with a row for each group of cases.

    Args:
        found: The results of each routine.
        report: The document that ``polyhead bench`` prints: of it the device, the machine and the
            rates of the processor.
        command: What measured the results.
        day: When, as ``2026-11-29``.
    """
    machine, rates = report["machine"], report["rates"]
    on_cpu = report["device"] == "cpu"
    heading = machine["processor"] if on_cpu else ", ".join(machine["accelerators"])
    dtypes = list(dict.fromkeys(dtype_name(r) for results in found.values() for r in results))
    heads = ["work", "rows", *dtypes]
    rows = [row for name, results in found.items() for row in _rows(name, results, dtypes)]
    about = [
        f"`{command}`, threads: {machine['threads']}, native code "
        f"`{machine['native_code'] or 'none'}`, {day}.",
        *([f"At most: {_listed(rates)}."] if rates else []),
        "Each cell: time of a peer ÷ ours · of the limit; geometric means.",
    ]
    table = [_line(heads), "|---|--:|" + "---|" * len(dtypes), *map(_line, rows)]
    return "\n\n".join([f"## {heading}", "\n".join(about), "\n".join(table)]) + "\n"


def _listed(rates: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {rate / 1e9:,.0f} {'GB/s' if name.startswith('read') else 'G operations/s'}"
        for name, rate in rates.items()
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rows(routine: str, results: Sequence[Result], dtypes: Sequence[str]) -> Iterator[list[str]]:
    least = ROUTINES[routine].long_from
    for group in dict.fromkeys(result.case.group for result in results):
        of_group = [result for result in results if result.case.group == group]
        counted = [r for r in of_group if r.case.length >= least] or of_group
        lengths = sorted({result.case.length for result in counted})
        span = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
        found = list(means(routine, counted))
        cells = [
            _cell(
                {mean["against"]: mean["ratio"] for mean in found if mean["dtype"] == name},
                [r.bound.kind for r in counted if r.bound is not None and dtype_name(r) == name],
            )
            for name in dtypes
        ]
        joined = f"{group} {span}" if group.endswith(":") else f"{group}, {span}"
        yield [f"{routine}, {joined}", f"{len(lengths)}", *cells]


def _cell(ratios: Mapping[str, float], bounds: Iterable[str]) -> str:
    """``torch SDPA 2.31 · 81% of operations``; empty without results."""
    parts = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "limit"]
    if "limit" in ratios:
        parts.append(f"{ratios['limit']:.0%} of {' or '.join(dict.fromkeys(bounds))}")
    return " · ".join(parts)
