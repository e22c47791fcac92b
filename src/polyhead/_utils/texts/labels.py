"""How tokens and heads are written for people, in the terminal, in pictures and on pages."""

from __future__ import annotations

import re
import unicodedata

_SIGNS = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # they shape the letters around them
_RIGHT_TO_LEFT = frozenset(("R", "AL", "AN"))
_BETWEEN = re.compile("(?<=[^␣])␣(?=[^␣])")
_ISOLATE, _END = "\u2068", "\u2069"


def visible(piece: str) -> str:
    """A token with signs for invisible characters: ␣ for a space, ⏎ for a line's end.

    Control characters, and those that turn the direction of writing, are shown by number; half a
    surrogate pair is U+FFFD, an accent without its letter gets a circle, no text is ∅.
    """
    shown = "".join(map(_sign, piece)) or "∅"
    return f"◌{shown}" if unicodedata.category(shown[0]).startswith("M") else shown


def label(piece: str) -> str:
    """``visible`` for axes and tables: single spaces before and between words are not marked."""
    spaced = len(piece) > 1 and piece[0] == " " != piece[1]
    return _BETWEEN.sub(" ", visible(piece[1:] if spaced else piece))


def isolated(text: str) -> str:
    """A label that, if written from right to left, does not reorder the line around it."""
    turns = any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in text)
    return f"{_ISOLATE}{text}{_END}" if turns else text


def head_name(layer: int | str, head: int) -> str:
    """``"18.6"``: layer, a point, query head, both counted from 0, as commands take them."""
    return f"{layer}.{head}"


def _sign(character: str) -> str:
    category = unicodedata.category(character)
    if character in _SIGNS or category == "Zs":
        return _SIGNS.get(character, "␣")
    if category == "Cs":
        return "\N{REPLACEMENT CHARACTER}"
    if category in ("Cc", "Cf", "Zl", "Zp") and character not in _JOINERS:
        return f"\\u{ord(character):04x}"
    return character
