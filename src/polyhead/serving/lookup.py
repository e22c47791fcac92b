"""Guesses at the next tokens of a request, copied from its own prompt and text.

Prompt lookup (Saxena 2023): where the last tokens stood before, what followed them then is the
guess. A step checks several tokens at the price of a few, so guesses cost little where they are
right often enough; the tokens that are drawn are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

MATCH = 3
"""Tokens that must have stood together before."""
WORTH = 4
"""Wrong guesses that one right guess pays for."""
CREDIT = 32
"""Guesses without success after which a request makes none."""


class Lookup:
    """The guesses of one request.

    It makes none once fewer than one in ``WORTH`` has been right, until tokens are again those that
    it would have guessed. It counts tokens and reads no clock.

    Attributes:
        guessed: Guesses that were checked.
        accepted: Those that were right.
    """

    def __init__(self) -> None:
        self.guessed = self.accepted = 0
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
        self.guessed += guessed
        self.accepted += accepted
        self._credit = min(CREDIT, self._credit + WORTH * accepted - guessed)

    def _listen(self, token: int) -> None:
        """Whether a guess that was not made would have been right."""
        if self._silent is not None:
            self._credit += WORTH if token == self._silent else -1
            self._credit = max(-CREDIT, self._credit)
            self._silent = None
