"""What a run's steps gave: a line of JSON each, and their curves as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polyhead._utils.atomic_write import write_file
from polyhead._utils.svg import element, image, words
from polyhead.training.run import Step

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 300, 56, 34, 40
_POINTS = 400


class History:
    """The steps of a run, kept in a file.

    Args:
        path: The file; it is made with the first step.
        steps: Done before: what the file says of later ones is left out.
    """

    def __init__(self, path: Path, steps: int = 0) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        if steps and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:  # incomplete last line of a killed run
                    break
                if entry["step"] <= steps:
                    self.entries.append(entry)
        self._begun = False

    def add(self, step: Step, seconds: float, **more: float) -> None:
        """Writes a step."""
        entry = {
            "step": step.number, "loss": step.loss, "lr": step.lr, "tokens": step.tokens,
            "seconds": round(seconds, 3),
        }  # fmt: skip
        if step.validation is not None:
            entry["validation"] = step.validation
        self._write(entry | more)

    def note(self, step: int, **figures: float) -> None:
        """Writes figures that were taken after a step, such as BLEU."""
        self._write({"step": step, **figures})

    def _write(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        if not self._begun:  # drop lines of steps that will be repeated
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, "".join(json.dumps(each) + "\n" for each in self.entries))
            self._begun = True
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def draw(self, path: Path, title: str) -> None:
        """Writes the curves of the loss, of training and validation, as SVG."""
        lines = {
            name: [(each["step"], each[name]) for each in self.entries if name in each]
            for name in ("loss", "validation")
        }
        write_file(path, curves(lines, title))


def curves(lines: dict[str, list[tuple[float, float]]], title: str) -> str:
    """An SVG of curves over steps, the values on a logarithmic axis.

    Args:
        lines: Names to points of step and value above 0.
    """
    shown = {name: _thinned(points) for name, points in lines.items() if points}
    values = [y for points in shown.values() for _, y in points if y > 0] or [1.0]
    last = max((x for points in shown.values() for x, _ in points), default=1.0)
    low, high = min(values) / 1.05, max(values) * 1.05

    def across(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 16) * x / max(last, 1.0)

    def up(y: float) -> float:
        share = math.log(max(y, low) / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share

    parts = [_label(_LEFT, 20, title, anchor="start", size=14)]
    for y in _ticks(low, high):
        parts.append(element("path", d=f"M{_LEFT} {up(y):.1f}H{_WIDTH - 16}", stroke="#ddd"))
        parts.append(_label(_LEFT - 6, up(y) + 4, f"{y:g}", anchor="end"))
    parts += [_label(across(x), _HEIGHT - 22, f"{x:,.0f}") for x in (0.0, last / 2, last)]
    parts.append(_label(_WIDTH / 2, _HEIGHT - 6, "steps"))
    for (name, points), colour in zip(shown.items(), ("#9db4d8", "#12408f"), strict=False):
        path = "M" + "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
        parts.append(element("path", d=path, fill="none", stroke=colour, stroke_width=1.5))
        x, y = points[-1]
        parts.append(_label(across(x), up(y) - 6, f"{name} {y:.3f}", anchor="end", fill=colour))
    return image((0, 0, _WIDTH, _HEIGHT), *parts, title=title, paper="#fff")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 400 points, each the mean of its neighbours."""
    size = max(1, -(-len(points) // _POINTS))
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def _ticks(low: float, high: float) -> list[float]:
    steps = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)]
    return [tick for tick in steps if low <= tick <= high]


def _label(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11,
           fill: str = "#444") -> str:  # fmt: skip
    return element("text", words(text), x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor,
                   font_size=size, font_family="sans-serif", fill=fill)  # fmt: skip
