"""Curves of a run: what is greater stands higher, each curve has its name, ticks are in range."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from polyhead.training.history import curves

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("count", [2, 5, 3000])
def test_curves_are_drawn_in_the_order_of_their_values(count: int) -> None:
    loss = [(float(step), 8.0 / (1 + step)) for step in range(1, count + 1)]
    lines = {"loss": loss, "validation": [(x, 2 * y) for x, y in loss], "nothing": []}
    drawn = ElementTree.fromstring(curves(lines, "tiny"))
    left, top, width, height = map(float, drawn.attrib["viewBox"].split())
    ends = {}
    for path in drawn.iter(f"{SVG}path"):
        if "stroke-width" not in path.attrib:
            continue  # a line of the scale
        points = re.findall(r"([\d.]+)[ ,]([\d.]+)", path.attrib["d"])
        xs, ys = ([float(pair[axis]) for pair in points] for axis in (0, 1))
        assert 2 <= len(points) <= min(count, 400)
        assert xs == sorted(xs)
        assert ys == sorted(ys)  # downwards, as a loss falls
        ends[path.attrib["stroke"]] = ys[-1]
    labels = list(drawn.iter(f"{SVG}text"))
    assert all(label.attrib["font-size"] for label in labels)
    for label in labels:
        assert left <= float(label.attrib["x"]) <= width
        assert top <= float(label.attrib["y"]) <= height
    words = {"".join(label.itertext()): label for label in labels}
    named = [label for text, label in words.items() if text.startswith(("loss", "validation"))]
    assert len(named) == len(ends) == 2
    for label in named:
        assert float(label.attrib["y"]) == pytest.approx(ends[label.attrib["fill"]] - 6, abs=0.2)
    assert f"loss {loss[-1][1]:.3f}" in words or count == 3000
    heights = [float(label.attrib["y"]) for label in named]
    assert heights[1] < heights[0]  # twice as great
