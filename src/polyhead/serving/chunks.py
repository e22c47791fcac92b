"""How many tokens of prompts a round reads while other requests wait for their next token.

Tokens are counted against a limit of time by the speed at which the last chunks were read. A chunk
of n tokens takes a + b·n seconds, so a short one looks slow, the next is longer than that, and a
few rounds later it takes what it may. No clock is read here.
"""

from __future__ import annotations

_MEMORY = 0.5


class Chunks:
    """Cuts prompts into chunks.

    Args:
        most: Tokens of a round at most.
        seconds: What reading them may take where others wait; None: no limit.
        least: Tokens that a round reads however long they take.
    """

    def __init__(self, most: int, seconds: float | None, least: int) -> None:
        self._most, self._seconds, self._least = most, seconds, least
        self._read = self._took = 0.0

    def tokens(self, rest: int, left: int, *, beside: bool) -> int:
        """Tokens of the next chunk.

        Args:
            rest: Those that its prompt still has.
            left: Those of the round's ``most`` that are left.
            beside: Whether others wait.

        Returns:
            0 where the round has read some, and has no time for ``least`` more.
        """
        count, read = min(rest, left), self._most - left
        if self._seconds is None or not beside or not self._took:
            return count
        fits = int(min(self._most, self._seconds * self._read / self._took)) - read
        if fits < min(self._least, count):
            fits = 0 if read else self._least
        return min(count, fits)

    def count(self, tokens: int, seconds: float) -> None:
        """Notes what a chunk took."""
        self._read = _MEMORY * self._read + tokens
        self._took = _MEMORY * self._took + seconds
