"""Matrices as people write them: in tall brackets, shortened where they are large.

           ⎡ 1  0  1  0 ⎤   ⎡ 1  0 ⎤   ⎡ 2  0 ⎤
           ⎢ 0  1  0  1 ⎥ · ⎢ 0  1 ⎥ = ⎢ 0  2 ⎥
           ⎣ 1  1  0  0 ⎦   ⎢ 1  0 ⎥   ⎣ 1  1 ⎦
                            ⎣ 0  1 ⎦

Where the encoding of standard output lacks these brackets, they are ``[`` and ``]`` on every line.

A block is a list of lines (``rich.text.Text``) of equal width; blocks are set side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from polyhead._utils.texts.labels import isolated, label
from polyhead.cli.encoding import plain

Block = list[Text]

_LABEL_CELLS = 10
_FAINT_BELOW = 0.05
_FAINT = "dim"
_STRONG = "bold cyan"


def matrix(
    values: Sequence[Sequence[float]],
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    most_rows: int = 8,
    most_columns: int = 8,
    emphasise: bool = False,
) -> Block:
    """Draws ``values`` in brackets.

    Args:
        values: the rows, all of one length.
        rows: a label per row, set at the left.
        columns: a label per column, set above.
        most_rows: more rows than this are shortened with ⋮ in the middle.
        emphasise: the largest number of each row in bold, numbers near 0 faint.
    """
    shown_rows = _pick(len(values), most_rows)
    shown_columns = _pick(len(values[0]), most_columns)
    form = _number_format(values)
    cells = [[_cell(values, form, row, column) for column in shown_columns] for row in shown_rows]
    heads = [_name(columns, column, "…") for column in shown_columns] if columns else []
    widths = [
        max(cell_len(line[i]) for line in [*cells, *([heads] if heads else [])])
        for i in range(len(shown_columns))
    ]
    labels = [_name(rows, row, "⋮") for row in shown_rows] if rows else [""] * len(shown_rows)
    margin = max(cell_len(label) for label in labels)
    block: Block = []
    if heads:
        titles = "  ".join(_right(head, width) for head, width in zip(heads, widths, strict=True))
        indent = " " * (margin + (1 if margin else 0) + 2)
        block.append(Text(f"{indent}{titles}  ", style=_FAINT))
    for place, (row, line) in enumerate(zip(shown_rows, cells, strict=True)):
        left, right = _brackets(place, len(cells))
        text = Text()
        if margin:
            text.append(set_cell_size(labels[place], margin) + " ", style=_FAINT)
        text.append(f"{left} ")
        for i, column in enumerate(shown_columns):
            style = _style(values[row], column) if emphasise and row >= 0 <= column else ""
            text.append("  " if i else "")
            text.append(_right(line[i], widths[i]), style=style)
        text.append(f" {right}")
        block.append(text)
    return block


def beside(*blocks: Block | str) -> Block:
    """Sets blocks (or a sign such as ``"·"``) side by side, each in the middle of the height."""
    drawn = [[Text(f" {block} ")] if isinstance(block, str) else block for block in blocks]
    height = max(len(block) for block in drawn)
    lines = [Text() for _ in range(height)]
    for block in drawn:
        wide, above = width_of(block), (height - len(block)) // 2
        for index, line in enumerate(lines):
            inside = 0 <= index - above < len(block)
            part = block[index - above] if inside else Text()
            line.append_text(part)
            line.append(" " * (wide - part.cell_len))
    return lines


def width_of(block: Block) -> int:
    return max((line.cell_len for line in block), default=0)


def _pick(count: int, most: int) -> list[int]:
    """Indexes to show; −1 stands for those left out."""
    if count <= most:
        return list(range(count))
    tail = max(1, (most - 1) // 2)
    return [*range(most - 1 - tail), -1, *range(count - tail, count)]


def _number_format(values: Sequence[Sequence[float]]) -> str:
    finite = [abs(v) for row in values for v in row if math.isfinite(v)]
    if all(v == int(v) for v in finite) and max(finite, default=0.0) < 1e6:
        return ".0f"
    return ".3f" if max(finite) < 1e4 else ".4g"


def _cell(values: Sequence[Sequence[float]], form: str, row: int, column: int) -> str:
    if row < 0 or column < 0:
        return plain("⋱" if row < 0 and column < 0 else "⋮" if row < 0 else "…")
    return number(values[row][column], form)


def number(value: float, form: str = ".3f") -> str:
    """A number for reading; −∞ is a masked score."""
    if math.isinf(value):
        return plain("−∞" if value < 0 else "∞")
    text = format(value, form)
    return text[1:] if text.startswith("-") and not float(text) else text


def _style(row: Sequence[float], column: int) -> str:
    """The style of a weight: the largest of its row is bold, those near 0 are dim."""
    if row[column] == max(row) > 0:
        return _STRONG
    return _FAINT if row[column] < _FAINT_BELOW else ""


def _name(names: Sequence[str], index: int, left_out: str) -> str:
    if index < 0:
        return plain(left_out)
    name = plain(label(names[index]))
    if cell_len(name) > _LABEL_CELLS:
        name = set_cell_size(name, _LABEL_CELLS - 1).rstrip() + "…"
    return isolated(name)


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text


def _brackets(place: int, count: int) -> tuple[str, str]:
    if count == 1:
        return "[", "]"
    if place == 0:
        return "⎡", "⎤"
    return ("⎣", "⎦") if place == count - 1 else ("⎢", "⎥")
