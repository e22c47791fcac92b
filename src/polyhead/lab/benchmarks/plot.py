"""Rate against length as an SVG of small panels, readable on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from polyhead._utils.svg import element, image, words
from polyhead.lab.benchmarks.measure import OURS, Result
from polyhead.lab.benchmarks.results import dtype_name

_WIDTH, _HEIGHT, _COLUMNS = 300, 210, 3
_HEAD = 44  # two lines of names, five each
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 40, 14, 30
_COLOURS = ("#0b7285", "#d9480f", "#862e9c", "#5c940d", "#a61e4d")
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #212529 } .title { font-weight: 600 }
.grid { stroke: #868e96; stroke-opacity: .35 } .line { fill: none; stroke-width: 2 }
.limit { stroke: #868e96; stroke-dasharray: 4 3 } .ground { fill: #ffffff }
@media (prefers-color-scheme: dark) { text { fill: #e9ecef } .ground { fill: #16191d }
  .line { filter: brightness(1.5) } }
"""
Points = list[tuple[int, float]]


def plot(found: Mapping[str, Sequence[Result]]) -> str:
    """A panel for every group of cases with two lengths or more."""
    panels = [panel for name, results in found.items() for panel in _panels(name, results)]
    names = list(dict.fromkeys(name for *_, lines in panels for name in lines if name != "limit"))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    drawn = [
        element(
            "g",
            _panel(title, group, unit, lines, colours),
            transform=f"translate({i % _COLUMNS * _WIDTH},{_HEAD + i // _COLUMNS * _HEIGHT})",
        )
        for i, (title, group, unit, lines) in enumerate(panels)
    ]
    width, height = _COLUMNS * _WIDTH, _HEAD + math.ceil(len(panels) / _COLUMNS) * _HEIGHT
    ground = element("rect", class_="ground", width=width, height=height)
    style = element("style", _STYLE)
    return image((0, 0, width, height), style, ground, _legend(colours), *drawn, width=width)


def _panels(
    routine: str, results: Iterable[Result]
) -> Iterable[tuple[str, str, str, dict[str, Points]]]:
    groups: dict[tuple[str, str, str], dict[str, Points]] = {}
    for result in results:
        case = result.case
        if not case.unit:
            continue
        title = f"{routine}, {dtype_name(result)}"
        lines = groups.setdefault((title, case.group, case.unit), {})
        samples = {OURS: result.ours, **result.peers}
        if result.limit is not None:
            samples["limit"] = result.limit
        for name, sample in samples.items():
            lines.setdefault(name, []).append((case.length, result.rate(sample)))
    for (title, group, unit), lines in groups.items():
        if len(lines[OURS]) > 1:
            yield title, group, unit, lines


def _panel(
    title: str, group: str, unit: str, lines: dict[str, Points], colours: dict[str, str]
) -> str:
    lengths = sorted({length for points in lines.values() for length, _ in points})
    top = max(rate for points in lines.values() for _, rate in points)
    scale, prefix = (1e9, "G") if top >= 1e9 else (1e3, "k") if top >= 1e4 else (1.0, "")
    first, span = math.log(lengths[0]), math.log(lengths[-1]) - math.log(lengths[0])
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(length: int) -> float:
        return _LEFT + (math.log(length) - first) / span * inner_width

    def y(rate: float) -> float:
        return _TOP + (1 - rate / top) * inner_height

    parts = [
        element("text", words(title), class_="title", x=_LEFT, y=14),
        element("text", words(f"{group} · {prefix}{unit}"), x=_LEFT, y=28),
    ]
    for share in (0.0, 0.5, 1.0):
        at, label = y(share * top), f"{share * top / scale:,.3g}"
        parts.append(element("path", class_="grid", d=f"M{_LEFT} {at:.1f}h{inner_width}"))
        parts.append(element("text", label, x=_LEFT - 6, y=f"{at + 4:.1f}", text_anchor="end"))
    parts += [
        element("text", f"{length}", x=f"{x(length):.1f}", y=_HEIGHT - 12, text_anchor="middle")
        for length in lengths
    ]
    for name, points in lines.items():
        path = " L".join(f"{x(length):.1f} {y(rate):.1f}" for length, rate in sorted(points))
        parts.append(_line(name, f"M{path}", colours, element("title", words(name))))
        if name != "limit":
            parts += [
                element(
                    "circle",
                    cx=f"{x(length):.1f}",
                    cy=f"{y(rate):.1f}",
                    r=2.5,
                    fill=colours[name],
                )
                for length, rate in points
            ]
    return "".join(parts)


def _legend(colours: dict[str, str]) -> str:
    return "".join(
        _line(name, f"M{12 + 176 * (i % 5)} {14 + 20 * (i // 5)}h24", colours)
        + element("text", words(name), x=42 + 176 * (i % 5), y=18 + 20 * (i // 5))
        for i, name in enumerate([*colours, "limit"])
    )


def _line(name: str, path: str, colours: dict[str, str], content: str = "") -> str:
    kind = "line limit" if name == "limit" else "line"
    return element("path", content, class_=kind, stroke=colours.get(name), d=path)
