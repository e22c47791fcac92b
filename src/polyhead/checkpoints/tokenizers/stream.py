"""Decoding ids as they arrive, without ever showing half a character.

One character can be several tokens. A stream holds back what is not yet a whole character; what it
has emitted never changes, and everything emitted, ``flush`` included, is the text of all the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder(Protocol):
    """Turns ids into text one by one."""

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the ids; an unfinished character becomes U+FFFD."""
        ...


class ByteStream:
    """A stream for byte-level vocabularies, whose tokens are bytes of UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Container[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class TextStream:
    """A stream for every other vocabulary: the difference that each id makes to the decoded text.

    Spaces can depend on the token before, so each difference is taken with the ids of the piece
    emitted last in front.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped: Container[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._ids: list[int] = []
        self._emitted = 0  # how many of the ids have been emitted as text

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._difference()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text

    def flush(self) -> str:
        rest = self._difference()
        self._ids, self._emitted = [], 0
        return rest

    def _difference(self) -> str:
        before = self._decode(self._ids[: self._emitted])
        return self._decode(self._ids)[len(before) :]
