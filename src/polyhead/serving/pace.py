"""How many tokens are worth guessing by a model: what that costs against what it gives.

A step of n tokens takes about 1 + (n − 1) · ``TOKEN`` times a step of one. With a share α of right
guesses, k guesses a row give (1 − α^(k+1)) / (1 − α) tokens a step (Leviathan et al. 2023, arXiv
2211.17192, eq. 1), so the best k is the one with the most tokens for its time. No clock is read.
"""

from __future__ import annotations

TOKEN = 0.17
"""What a further token of a step takes, in steps of one token: eight take about 2.2 (docs/serving).
"""
PAUSE = 16
"""Steps between two trials while guesses do not pay."""
_MEMORY = 0.98
_PRIOR = 6.0, 8.0


class Pace:
    """The number of guesses of each row of a step.

    Args:
        cost: Time of a step of the draft, in steps of the model.
    """

    def __init__(self, cost: float) -> None:
        self._cost = cost
        self._right, self._tried = _PRIOR
        self._paused = 0

    def tokens(self, rows: int, most: int) -> int:
        """Guesses of each of ``rows`` rows, at most ``most``; 0 while they do not pay."""
        best = max(range(most + 1), key=lambda count: self._rate(rows, count))
        if best or most < 1:
            self._paused = 0
            return best
        self._paused += 1
        if self._paused < PAUSE:
            return 0
        self._paused = 0
        return 1

    def count(self, guessed: int, accepted: int) -> None:
        """Counts the guesses of a row that were checked, and those of them that were right."""
        tried = min(guessed, accepted + 1)  # what comes behind a wrong one says nothing
        self._right = _MEMORY**tried * self._right + accepted
        self._tried = _MEMORY**tried * self._tried + tried

    def _rate(self, rows: int, count: int) -> float:
        """Tokens of a row in the time of a step of one token."""
        share = self._right / self._tried
        made = sum(share**place for place in range(count + 1))
        drafting = count * self._cost * _time(rows)
        return made / (_time(rows * (1 + count)) + drafting)


def _time(tokens: int) -> float:
    return 1.0 + TOKEN * (tokens - 1)
