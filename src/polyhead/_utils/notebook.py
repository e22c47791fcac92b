"""How objects show themselves in a notebook: HTML that loads nothing and runs nothing.

Every output has an id of its own, and its style is for that id alone, so that outputs do not change
each other, however often a cell is run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from html import escape

_STYLE = (
    "{{font:13px/1.5 system-ui,sans-serif;color-scheme:light dark}}"
    "#{id} table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}"
    "#{id} th,#{id} td{{padding:2px 12px 2px 0;text-align:start;"
    "border-bottom:1px solid color-mix(in srgb,currentColor 20%,transparent)}}"
    "#{id} pre{{font:12px/1.45 ui-monospace,monospace;margin:0;overflow-x:auto;white-space:pre}}"
    "#{id} .picture svg{{max-width:100%;height:auto;color-scheme:light}}"
)


def panel(title: str, *parts: str) -> str:
    """One output: a title and parts made by the functions below."""
    name = f"polyhead-{secrets.token_hex(4)}"
    style = f"#{name}{_STYLE.format(id=name)}"
    return f'<div id="{name}"><style>{style}</style><b>{escape(title)}</b>{"".join(parts)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a heading for each column."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def lines(text: str) -> str:
    """A text as it is printed."""
    return f"<pre>{escape(text)}</pre>"


def picture(svg: str) -> str:
    """An SVG image."""
    return f'<div class="picture">{svg}</div>'
