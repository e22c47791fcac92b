"""What was measured, as data and as tables for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyhead.lab.benchmarks.measure import OURS, Result, Sample

if TYPE_CHECKING:
    from rich.table import Table


def document(found: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """All rows and the geometric means, as JSON's types."""
    return {
        "rows": [_row(name, result) for name, results in found.items() for result in results],
        "geometric_means": [
            mean for name, results in found.items() for mean in means(name, results)
        ],
    }


def _row(routine: str, result: Result) -> dict[str, Any]:
    case = result.case
    samples = {OURS: result.ours, **result.peers}
    return {
        "routine": routine,
        "case": case.group,
        "length": case.length,
        "dtype": dtype_name(result),
        "measured": _measured(result),
        "samples": {name: sample.as_dict() for name, sample in samples.items()},
        "unit": case.unit or None,
        "rates": {n: result.rate(s) for n, s in samples.items()} if case.unit else None,
        "ratios": result.ratios,
        "processor_ratios": result.processor_ratios or None,
        "alike": dict(result.alike) or None,
        "limit": None if result.limit is None or result.bound is None else {
            "kind": result.bound.kind, "name": result.bound.name,
            "rate": result.rate(result.limit), **result.limit.as_dict(),
        },
        "of_limit": result.of_limit,
    }  # fmt: skip


def dtype_name(result: Result) -> str:
    """A dtype's name without ``torch.``."""
    return str(result.case.dtype).removeprefix("torch.")


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def means(routine: str, results: Iterable[Result]) -> Iterator[dict[str, Any]]:
    """Geometric means of the ratios to each peer and to the limit, by dtype; bytes stand alone."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for result in results:
        against = dict(result.ratios)
        if result.of_limit is not None:
            against["limit"] = result.of_limit
        for name, ratio in against.items():
            key = _measured(result), dtype_name(result), name
            ratios.setdefault(key, []).append(ratio)
    for (measured, dtype, name), values in ratios.items():
        yield {
            "routine": routine if measured == "seconds" else f"{routine}, memory",
            "dtype": dtype,
            "against": name,
            "ratio": geometric_mean(values),
            "rows": len(values),
        }


def table(routine: str, summary: str, results: Iterable[Result]) -> Table:
    """A line per case: our median, half its quartiles' distance, each peer's median over ours."""
    from rich.table import Table
    from rich.text import Text

    found = Table(title=Text(f"{routine}: {summary}", style="bold"), title_justify="left", box=None)
    found.add_column("case")
    for column in ("dtype", "polyhead", "rate", "±", "of limit"):
        found.add_column(column, justify="right", no_wrap=True)
    found.add_column("peer ÷ polyhead", min_width=26)
    for result in results:
        share = "" if result.of_limit is None else f"{result.of_limit:.0%}"
        if result.bound is not None:
            share += f" {result.bound.kind}"
        found.add_row(
            f"{result.case.group} {result.case.length}", dtype_name(result), _amount(result),
            _rate(result), _spread(result.ours), share,
            "\n".join(_against(result, name) for name in result.peers),
        )  # fmt: skip
    return found


def means_table(found: Mapping[str, Sequence[Result]]) -> Table:
    """A line per routine and dtype."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text("geometric means", style="bold"), title_justify="left", box=None)
    for column in ("routine", "dtype", "against", "ratio", "rows"):
        shown.add_column(column, justify="right" if column in ("ratio", "rows") else "left")
    for name, results in found.items():
        for mean in means(name, results):
            limit = mean["against"] == "limit"
            ratio = f"{mean['ratio']:.0%}" if limit else f"{mean['ratio']:.2f}"
            shown.add_row(mean["routine"], mean["dtype"], mean["against"], ratio, str(mean["rows"]))
    return shown


def _against(result: Result, name: str) -> str:
    """A peer's time over ours; that of the processor; how much of its result is ours."""
    words = f"{name} {result.ratios[name]:.2f}"
    if (processor := result.processor_ratios.get(name)) is not None:
        words += f", processor {processor:.2f}"
    if (alike := result.alike.get(name)) is not None:
        words += f", {alike:.0%} alike"
    return words


def _measured(result: Result) -> str:
    """What was measured of a call; a rate is of seconds."""
    return "seconds" if result.case.unit else "bytes"


def _amount(result: Result) -> str:
    if not result.case.unit:
        return f"{result.ours.median / 1e6:.1f} MB"
    return f"{result.ours.median * 1e3:.3f} ms"


def _rate(result: Result) -> str:
    if not result.case.unit:
        return ""
    rate = result.rate(result.ours)
    return (
        f"{rate / 1e9:,.1f} G{result.case.unit}"
        if rate >= 1e9
        else f"{rate:,.1f} {result.case.unit}"
    )


def _spread(sample: Sample) -> str:
    """Half the distance of the quartiles, as a fraction of the median."""
    low, high = sample.quartiles
    return f"{(high - low) / 2 / sample.median:.0%}"
