"""Draws tables of docs/performance.md as the pictures that the page shows above them.

python tools/performance_pictures.py
"""

from __future__ import annotations

import math
from pathlib import Path

from polyhead._utils.svg import ACCENT, FRAME, INK, PAPER, element, image, words
from translations import tables

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, HEIGHT, LEFT, TOP = 460, 210, 46, 48
DASHES = ("", "7 4", "2 3", "9 3 2 3")
Line = tuple[str, list[float | None]]


def pictures() -> dict[str, str]:
    """The SVG of each plot, by the name of its file."""
    found = tables((DOCS / "performance.md").read_text(encoding="utf-8"))
    return {
        f"speed-{name}.svg": _plot(next(each for each in found if first in each[0][0]), title)
        for name, first, title in (
            ("prefill", "heads, tokens:", "Prompts: time of SDPA ÷ polyhead, by tokens"),
            ("decode", "query/kv heads, keys:", "Decoding: time of SDPA ÷ polyhead, by keys"),
        )
    }


def _plot(table: list[list[str]], title: str) -> str:
    """Two panels, float32 and bfloat16, of the second number of each cell."""
    labels = [cell.strip() for cell in table[0][2:]]
    panels = ""
    height = TOP
    for dtype in ("float32", "bfloat16"):
        lines = [
            (row[0].strip(), [_ratio(cell) for cell in row[2:]])
            for row in table[1:]
            if row[1].strip() == dtype
        ]
        lines = [line for line in lines if sum(value is not None for value in line[1]) > 1]
        panels += element("g", _panel(lines, labels, dtype), transform=f"translate(0 {height})")
        height += HEIGHT + 60
    heading = _text(title, 10, 18)
    box = (0, 0, WIDTH + LEFT + 150, height - 20)
    return image(box, heading, panels, title=title, paper=PAPER)


def _ratio(cell: str) -> float | None:
    parts = cell.split("·")
    return float(parts[1]) if len(parts) == 3 else None


def _panel(lines: list[Line], labels: list[str], dtype: str) -> str:
    values = [value for _, line in lines for value in line if value is not None]
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    low = min(low, 0)

    def height(value: float) -> float:
        return HEIGHT - HEIGHT * (math.log2(value) - low) / (high - low)

    def place(i: int) -> float:
        return LEFT + (WIDTH - 30) * i / (len(labels) - 1)

    drawn = _text(dtype, LEFT, -6)
    for power in range(low, high + 1):
        y = height(2.0**power)
        colour, wide = (INK, 1.5) if power == 0 else (FRAME, 0.75)
        drawn += element(
            "path", d=f"M{LEFT} {y:.1f}h{WIDTH - 30}", stroke=colour, stroke_width=wide
        )
        drawn += _text(f"{2.0**power:g} ×", LEFT - 6, y + 4, anchor="end")
    for i, label in enumerate(labels):
        drawn += _text(label, place(i), HEIGHT + 16, anchor="middle")
    ends = []
    for (name, line), dash in zip(lines, DASHES, strict=False):
        points = [(place(i), height(value)) for i, value in enumerate(line) if value is not None]
        way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawn += element(
            "path", d=way, fill="none", stroke=ACCENT, stroke_width=2, stroke_dasharray=dash or None
        )
        ends.append((points[-1][1], points[-1], name))
    last = -math.inf
    for y, (x, _), name in sorted(ends):
        last = max(y, last + 15)  # labels that would lie on each other move down
        drawn += _text(name, x + 8, last + 4)
    return drawn


def _text(text: str, x: float, y: float, anchor: str | None = None) -> str:
    return element(
        "text", words(text), x=f"{x:.1f}", y=f"{y:.1f}", font_size=12, fill=INK,
        font_family="sans-serif", text_anchor=anchor,
    )  # fmt: skip


if __name__ == "__main__":
    for name, picture in pictures().items():
        (DOCS / "pictures" / name).write_text(picture, encoding="utf-8")
        print(DOCS / "pictures" / name)
