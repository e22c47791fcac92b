"""Writes the SVG elements that the pictures here need.

image((0, 0, 20, 10), element("path", d=squares([(0, 1)], 10), fill="#12408f"), title="...")
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, PAPER, ACCENT, FRAME, QUIET = "#1c2330", "#ffffff", "#12408f", "#c9d1dd", "#e3e8f0"
"""Colours of text, background, visible squares, frames and hidden squares."""

_DARK = {INK: "#e6eaf2", PAPER: "#14181f", ACCENT: "#8fb8ff", FRAME: "#3d4656", QUIET: "#2a3140"}
"""The same for readers of dark pages."""


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element.

    Args:
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
        title: What readers of the screen are told; empty: nothing.
        paper: Colour under everything; None: the page's own. With ``PAPER`` the colours above have
            dark ones in their place where the reader's pages are dark, in a file of its own alone:
            within a page that stays as it is drawn.
        sized: Shown as large as the box, not as the page has room.
    """
    left, top, width, height = (f"{number:g}" for number in box)
    size = {"width": width, "height": height} if sized else {}
    ground = (
        element("rect", x=left, y=top, width="100%", height="100%", fill=paper) if paper else ""
    )
    label = element("title", words(title)) if title else ""
    label += element("style", words(_dark_style())) if paper == PAPER else ""
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


def _dark_style() -> str:
    """The colours by attribute, so that elements need no classes."""
    rules = "".join(
        f"svg:root [{name}='{light}']{{{name}:{dark}}}"
        for light, dark in _DARK.items()
        for name in ("fill", "stroke")
    )
    return f"@media(prefers-color-scheme:dark){{{rules}}}"
