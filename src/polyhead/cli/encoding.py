"""The signs of mathematics on a terminal or pipe whose encoding lacks them, such as ASCII.

Streams are opened with the error handler ``polyhead``, which writes a sign by the characters of
``_PLAIN``, so nothing that is printed needs to know. Code that prints columns calls ``plain``
first, because some signs become longer.
"""

from __future__ import annotations

import codecs
import sys

ERRORS = "polyhead"
"""Name of the error handler."""

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ", "0123456789T", strict=True))
_PLAIN = {
    "×": "x", "·": "*", "÷": "/", "−": "-", "±": "+-", "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~",
    "∞": "inf", "√": "sqrt ", "Σ": "sum ", "ε": "eps", "←": "<-", "→": "->", "…": "~", "⋮": ":",
    "⋱": ".", "⎡": "[", "⎢": "[", "⎣": "[", "⎤": "]", "⎥": "]", "⎦": "]", "█": "#", "▁": "_",
    "␣": "_", "⇥": ">", "⏎": "$", "✓": "+", "✗": "x", "•": "*", "§": "section ", "–": "-",
    "—": "-", "’": "'", "“": '"', "”": '"',
} | dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))  # fmt: skip


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    written, raised = "", False
    for sign in error.object[error.start : error.end]:
        power = _SUPERSCRIPTS.get(sign)
        written += ("" if raised else "^") + power if power else _PLAIN.get(sign, "?")
        raised = power is not None
    return written, error.end


codecs.register_error(ERRORS, _replace)


def plain(text: str) -> str:
    """``text`` as standard output will show it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, ERRORS).decode(encoding)


def can_write(text: str) -> bool:
    """Whether standard output shows every character of ``text``."""
    return plain(text) == text
