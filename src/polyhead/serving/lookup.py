"""Guesses at the next tokens of a request, copied from its own prompt and text.

Prompt lookup (Saxena 2023): where the last tokens stood before, what followed them then is the
guess. A step checks several tokens at the price of a few, so guesses cost little where they are
right often enough; the tokens that are drawn are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyhead.serving.guesser import Guesser
from polyhead.serving.row import Row

MATCH = 3
"""Tokens that must have stood together before."""
WORTH = 4
"""Wrong guesses that one right guess pays for."""
CREDIT = 32
"""Guesses without success after which a request makes none."""


class Lookups(Guesser):
    """The guesses of all requests.

    Args:
        most: Tokens that are guessed of a row at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lookups: dict[Row, Lookup] = {}

    def guess(self, rows: Sequence[Row], most: int, room: int) -> list[list[int]]:
        found = [self._lookups.setdefault(row, Lookup()) for row in rows]
        return [each.guess(row.all_ids, most) for row, each in zip(rows, found, strict=True)]

    def count(self, row: Row, guessed: int, accepted: int) -> None:
        if guessed:
            self._lookups[row].count(guessed, accepted)

    def drop(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._lookups.pop(row, None)


class Lookup:
    """The guesses of one request.

    It makes none once fewer than one in ``WORTH`` has been right, until tokens are again those that
    it would have guessed. It counts tokens and reads no clock.
    """

    def __init__(self) -> None:
        self._ids, self._ends = list[int](), dict[tuple[int, ...], int]()
        self._credit = CREDIT
        self._silent: int | None = None

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``ids``, which have only grown since the last."""
        for token in ids[len(self._ids) :]:
            self._listen(token)
            if len(self._ids) >= MATCH:
                self._ends[tuple(self._ids[-MATCH:])] = len(self._ids)
            self._ids.append(token)
        place = self._ends.get(tuple(self._ids[-MATCH:]))
        found = [] if place is None else self._ids[place : place + most]
        self._silent = None
        if self._credit <= 0:
            self._silent = found[0] if found else None
            return []
        return found

    def count(self, guessed: int, accepted: int) -> None:
        """Counts guesses that were checked, and those of them that were right."""
        self._credit = min(CREDIT, self._credit + WORTH * accepted - guessed)

    def _listen(self, token: int) -> None:
        """Whether a guess that was not made would have been right."""
        if self._silent is not None:
            self._credit += WORTH if token == self._silent else -1
            self._credit = max(-CREDIT, self._credit)
            self._silent = None
