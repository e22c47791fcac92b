"""What guesses the next tokens of requests, which a step of the model then checks.

The tokens that are drawn are those without guesses, with a seed too: a guess is kept where it is
the token that was drawn (speculative decoding; Leviathan et al. 2023, arXiv 2211.17192, keep the
distribution, and this keeps the draw itself).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.serving.row import Row


class Guesser:
    """Guesses the next tokens of rows; a base that makes none.

    Attributes:
        most: Tokens that it guesses of a row at most.
        wants_hidden: Whether it reads the model's hidden states.
    """

    most = 0
    wants_hidden = False

    @property
    def bytes(self) -> int:
        """Bytes of its caches, at most."""
        return 0

    def guess(self, rows: Sequence[Row], most: int, room: int) -> list[list[int]]:
        """Tokens that may come next, for each row; none are made up to fill ``most``.

        Args:
            rows: Rows of one call, each of which lacks its last token alone.
            most: Guesses of a row, fewer than the tokens that it may still draw.
            room: Guesses of all rows.
        """
        return [[] for _ in rows]

    def read(self, row: Row, hidden: Tensor) -> None:
        """Notes that a row's cache holds ``row.fed`` tokens.

        Args:
            row: It.
            hidden: The model's hidden states ``[n, E]`` of the last n of them: of all that were
                read, where they are wanted.
        """

    def count(self, row: Row, guessed: int, accepted: int) -> None:
        """Counts guesses that were checked, and those of them that were right."""

    def drop(self, rows: Sequence[Row]) -> None:
        """Forgets rows."""

    def forget_prefixes(self) -> None:
        """Forgets what it keeps for later rows."""


def guesses_of(
    guesser: Guesser, rows: Sequence[Row], read: Sequence[Sequence[int]], most: int
) -> list[list[int]]:
    """What may come next in rows of one call that has room for it, at most ``most`` tokens.

    Args:
        guesser: What guesses.
        rows: Those of the call.
        read: What each reads in it; one that reads its prompt has no guesses.
        most: Guesses of a row.
    """
    room = MAX_STEP_ROWS - sum(map(len, read))
    most = min(most, guesser.most, room)
    writing = [row for row in rows if not row.reads]
    if most < 1 or not writing:
        return [[] for _ in rows]
    made = zip(writing, guesser.guess(writing, most, room), strict=True)
    found = {row: guess[: row.left - 1] for row, guess in made}
    guesses = [found.get(row, []) for row in rows]
    while sum(map(len, guesses)) > room:
        most -= 1
        guesses = [guess[:most] for guess in guesses]
    return guesses
