"""Maps of heads and alignments as SVG: rows are queries, columns are keys, darker is more."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import east_asian_width

from torch import Tensor

from polyhead._utils.svg import ACCENT, FRAME, INK, PAPER, element, image, squares, words
from polyhead._utils.texts.labels import head_name, label
from polyhead.errors import InputError
from polyhead.interpret.probe import Probe
from polyhead.models.parts import HeadsByLayer

MOST = 96
"""Cells along each side of a map: longer texts share cells, the largest weight of each is shown."""

LABELLED = 48
"""Tokens up to which rows and columns are labelled."""

_MOST_LETTERS = 14

_LEGIBLE = 5.0
"""Size of letters from which tokens of an alignment are labelled."""

_SIDE = 300
_GAP = 28
_ACROSS = 3
_SHADES = 24
_FONT = "ui-sans-serif,system-ui,sans-serif"


def draw_heads(seen: Probe, heads: HeadsByLayer, pieces: Sequence[str], *, title: str = "") -> str:
    """An SVG with the maps of some heads on the first text of the batch.

    Args:
        seen: The probe of a run; it must have kept queries and keys.
        heads: Query heads by layer, both counted from 0; at least one.
        pieces: What each token says.
        title: Stands in the picture's description.

    Raises:
        InputError: No head, or one that is not there.
    """
    chosen = [(layer, head) for layer, numbers in heads.items() for head in numbers]
    if not chosen:
        raise InputError("draw_heads needs at least one head: got none")
    labelled = len(pieces) <= LABELLED
    cell = _SIDE / min(len(pieces), MOST)
    size = min(11.0, 0.82 * cell)
    margin = 0.62 * size * max((_length(piece) for piece in pieces), default=0) + 6
    margin = min(margin, 90) if labelled else 0
    across = min(_ACROSS, len(chosen))
    step_x, step_y = _SIDE + margin + _GAP, _SIDE + margin + _GAP + 22
    width, height = across * step_x + _GAP, -(-len(chosen) // across) * step_y + _GAP
    maps = []
    for number, (layer, head) in enumerate(chosen):
        weights = seen[layer].map(head, MOST)[0]
        x = _GAP + (number % across) * step_x + margin
        y = _GAP + (number // across) * step_y + 22
        name = element(
            "text", f"head {head_name(layer, head)}", y=-8, font_size=14, font_weight=600, fill=INK
        )
        drawn = name + _cells(weights, _SIDE / max(weights.shape))
        drawn += _labels(pieces, pieces, cell, size) if labelled else ""
        maps.append(element("g", drawn, transform=f"translate({x:.1f} {y:.1f})"))
    return image(
        (0, 0, round(width), round(height)),
        *maps,
        title=title,
        paper=PAPER,
        shape_rendering="crispEdges",
        font_family=_FONT,
    )


def draw_alignment(
    weights: Tensor, source: Sequence[str], target: Sequence[str], *, title: str = ""
) -> str:
    """An SVG with what each target token reads of a source: rows are targets, columns sources.

    Args:
        weights: ``[T, S]``, as of ``SourceAlignment``.
        source: What each source token says.
        target: What each target token says.
        title: Stands in the picture's description.

    Raises:
        InputError: Another number of tokens than the weights have.
    """
    if weights.shape != (len(target), len(source)):
        raise InputError(
            f"weights must be [{len(target)}, {len(source)}] for these tokens: got "
            f"{list(weights.shape)}"
        )
    cell = min(24.0, 2 * _SIDE / max(weights.shape))
    size = min(13.0, 0.7 * cell)
    left, below = (
        0.62 * size * max(_length(piece) for piece in pieces) + 14 for pieces in (target, source)
    )
    labels = _labels(target, source, cell, size) if size >= _LEGIBLE else ""
    drawn = element("g", _cells(weights, cell) + labels, transform=f"translate({left:.1f} 8)")
    width, height = left + cell * len(source) + 8, below + cell * len(target) + 8
    return image(
        (0, 0, round(width), round(height)),
        drawn,
        title=title,
        paper=PAPER,
        sized=True,
        shape_rendering="crispEdges",
        font_family=_FONT,
    )


def _cells(weights: Tensor, cell: float) -> str:
    """A frame, and one path for each shade: 24 steps of the root of the weight."""
    rows, columns = weights.shape
    frame = {"width": f"{cell * columns:g}", "height": f"{cell * rows:g}"}
    shades = (weights.clamp(0, 1).sqrt() * _SHADES).round().long()
    parts = [element("rect", **frame, fill="none", stroke=FRAME)]
    for shade in range(1, _SHADES + 1):
        places = (shades == shade).nonzero().tolist()
        if places:
            opacity = f"{shade / _SHADES:.3f}"
            path = squares([(i, j) for i, j in places], cell)
            parts.append(element("path", d=path, fill=ACCENT, fill_opacity=opacity))
    return "".join(parts)


def _labels(queries: Sequence[str], keys: Sequence[str], cell: float, size: float) -> str:
    """Queries on the left, keys below."""

    def middle(place: int) -> str:
        return f"{(place + 0.5) * cell + 0.35 * size:.1f}"

    bottom = f"{cell * len(queries) + 5:g}"
    parts = [
        element("text", words(label(piece)[:_MOST_LETTERS]), x=-5, y=middle(i))
        for i, piece in enumerate(queries)
    ] + [
        element(
            "text",
            words(label(piece)[:_MOST_LETTERS]),
            transform=f"translate({middle(i)} {bottom}) rotate(-90)",
        )
        for i, piece in enumerate(keys)
    ]
    labels = "".join(parts)
    return element("g", labels, font_size=f"{size:.1f}", fill=INK, text_anchor="end")


def _length(piece: str) -> int:
    """Width of a label in letters; Chinese characters count as two."""
    shown = label(piece)[:_MOST_LETTERS]
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in shown)
