"""A comparison as a picture, loss against cache bytes, and as a page that stands alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any

from polyhead._utils.svg import element, image, words
from polyhead.lab.comparison.document import cells, sentences

_WIDTH, _HEIGHT = 640, 360
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 30, 90, 48
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #212529 } .ground { fill: #ffffff }
.grid { stroke: #868e96; stroke-opacity: .35 } .bar { stroke: #0b7285; stroke-width: 2 }
circle { fill: #0b7285 }
@media (prefers-color-scheme: dark) { text { fill: #e9ecef } .ground { fill: #16191d }
  .bar { stroke: #66d9e8 } circle { fill: #66d9e8 } }
"""
_PAGE_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #212529; background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
td { white-space: nowrap }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #dee2e6 }
th:first-child, td:first-child { text-align: left } .wide { overflow-x: auto }
.warning { border-left: 4px solid #d9480f; padding-left: .8rem }
@media (prefers-color-scheme: dark) { body { color: #e9ecef; background: #16191d } }
"""


def plot(made: Mapping[str, Any]) -> str:
    """Validation loss against cache bytes a token, at the longest context that was measured.

    Bars are the intervals of the difference to MHA. Without losses or caches: an empty picture that
    says so.
    """
    drawn = [row for row in made["variants"] if row["runs"] and row["speed"]]
    length = max((int(n) for row in drawn for n in row["speed"]["cache"]), default=0)
    points = [(row["speed"]["cache"][str(length)] / length, row["loss"], row) for row in drawn]
    ground = element("rect", class_="ground", width=_WIDTH, height=_HEIGHT)
    parts = [element("style", _STYLE), ground]
    if not points:
        said = words("nothing to draw: no losses, or no caches measured")
        parts.append(element("text", said, x=_LEFT, y=_HEIGHT // 2))
    else:
        parts += _axes(points, length)
    title = "Validation loss against cache bytes a token"
    return image((0, 0, _WIDTH, _HEIGHT), *parts, title=title, width=_WIDTH)


def _axes(points: list[tuple[float, float, Mapping[str, Any]]], length: int) -> list[str]:
    ends = [loss + sign * _half(row) for _, loss, row in points for sign in (-1, 1)]
    low, high = min(ends), max(ends)
    margin = 0.1 * (high - low) or 0.01
    low, high = low - margin, high + margin
    left = math.floor(min(math.log2(x) for x, _, _ in points))
    right = max(left + 1, math.ceil(max(math.log2(x) for x, _, _ in points)))
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + (math.log2(value) - left) / (right - left) * inner_width

    def y_of(value: float) -> float:
        return _TOP + (high - value) / (high - low) * inner_height

    parts = [
        element("text", "validation loss, nats a token", x=_LEFT, y=18),
        element(
            "text",
            words(f"cache bytes a token at {length:,} tokens (float32)"),
            x=_LEFT + inner_width / 2,
            y=_HEIGHT - 8,
            text_anchor="middle",
        ),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * (high - low)
        y = y_of(value)
        parts.append(element("path", class_="grid", d=f"M{_LEFT} {y:.1f}h{inner_width}"))
        parts.append(
            element("text", f"{value:.3f}", x=_LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end")
        )
    for power in range(left, right + 1):
        at = f"{x_of(2.0**power):.1f}"
        parts.append(
            element("text", f"{2.0**power:,g}", x=at, y=_HEIGHT - 28, text_anchor="middle")
        )
    for x_value, loss, row in points:
        x, y, half = x_of(x_value), y_of(loss), _half(row)
        if half:
            bar = f"M{x:.1f} {y_of(loss + half):.1f}V{y_of(loss - half):.1f}"
            parts.append(element("path", class_="bar", d=bar))
        parts.append(element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4))
        parts.append(element("text", words(row["variant"]), x=f"{x + 8:.1f}", y=f"{y - 6:.1f}"))
    return parts


def _half(row: Mapping[str, Any]) -> float:
    said = row.get("difference")
    half: float = said["half_width"] if said else 0.0
    return half


def page(made: Mapping[str, Any]) -> str:
    """A self-contained HTML page: warnings, table, picture, sentences, and the JSON itself."""
    rows = [cells(row) for row in made["variants"]]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(row.get(name, '–'))}</td>" for name in headings) + "</tr>\n"
        for row in rows
    )
    warned = "".join(f'<p class="warning">{escape(said)}</p>\n' for said in made["warnings"])
    said = "".join(f"<p>{escape(sentence)}</p>\n" for sentence in sentences(made))
    data = escape(json.dumps(made, indent=1), quote=False)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Head layouts compared</title>\n'
        f"<style>{_PAGE_STYLE}</style>\n<h1>Head layouts compared</h1>\n{warned}"
        f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>\n{plot(made)}{said}'
        f"<details><summary>All numbers as JSON</summary><pre>{data}</pre></details></html>\n"
    )
