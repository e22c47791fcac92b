r"""What tokens say where a tokenizer splits characters: 猫 may be three tokens of a byte each.

A token that is part of a character shows that character and which part of it the token is:

    [b" \xe7\x8c", b"\xab"]  ->  [" 猫₁", "猫₂"]

Bytes that make no character are shown as they are (``\\xe7``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_PARTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def pieces_of(tokens: Sequence[bytes]) -> list[str]:
    """One text for each token of a text, in its order."""
    return [said for run in _whole_runs(tokens) for said in _said(run)]


def _whole_runs(tokens: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The tokens in runs that each end where a character ends, as short as they can be."""
    start, held = 0, b""
    for end, token in enumerate(tokens, 1):
        held = held[-3:] + token  # a character has at most four bytes
        if not _unfinished(held) or end == len(tokens):
            yield tokens[start:end]
            start, held = end, b""


def _unfinished(held: bytes) -> bool:
    """Whether the last character lacks bytes."""
    for back, byte in enumerate(reversed(held[-3:]), 1):
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def _said(run: Sequence[bytes]) -> list[str]:
    said = [""] * len(run)
    owner = [number for number, token in enumerate(run) for _ in token]
    place = 0
    for character in b"".join(run).decode("utf-8", "surrogateescape"):
        size = len(character.encode("utf-8", "surrogateescape"))
        shared = sorted(set(owner[place : place + size]))
        place += size
        if "\udc80" <= character <= "\udcff":
            character = f"\\x{ord(character) - 0xDC00:02x}"
        for part, token in enumerate(shared, 1):
            said[token] += character + (str(part).translate(_PARTS) if len(shared) > 1 else "")
    return said
