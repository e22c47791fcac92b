"""SVG files, in as many words as the pictures here need.

image((0, 0, 20, 10), element("path", d=squares([(0, 1)], 10), fill="#12408f"), title="...")
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element.

    Args:
        name: Such as ``"path"``.
        content: SVG that is within it; words go through ``words`` first.
        **attributes: ``text_anchor`` is text-anchor, ``class_`` class; None is left out.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{content}</{name}>" if content else f"<{name}{said}/>"


def words(text: str) -> str:
    """A text as content of an element."""
    return escape(text, quote=False)


def squares(places: Iterable[tuple[int, int]], side: float) -> str:
    """The path of a square at each (row, column) of a grid."""
    s = f"{side:.2f}".rstrip("0").rstrip(".")
    return "".join(f"M{side * j:g} {side * i:g}h{s}v{s}h-{s}z" for i, j in places)


def image(
    box: tuple[float, float, float, float],
    *parts: str,
    title: str = "",
    paper: str | None = None,
    sized: bool = False,
    **attributes: object,
) -> str:
    """A whole file.

    Args:
        box: Left, top, width and height of what is shown.
        *parts: Its elements.
        title: What readers of the screen are told; empty: nothing.
        paper: Colour under everything; None: the page's own.
        sized: Shown as large as the box, not as the page has room.
        **attributes: Of the outermost element.
    """
    left, top, width, height = (f"{number:g}" for number in box)
    size = {"width": width, "height": height} if sized else {}
    ground = (
        element("rect", x=left, y=top, width="100%", height="100%", fill=paper) if paper else ""
    )
    label = element("title", words(title)) if title else ""
    return (
        element(
            "svg",
            label + ground + "".join(parts),
            xmlns="http://www.w3.org/2000/svg",
            **size,
            viewBox=f"{left} {top} {width} {height}",
            role="img",
            **attributes,
        )
        + "\n"
    )
