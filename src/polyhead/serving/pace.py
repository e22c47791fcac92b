"""How many tokens are worth guessing by a model: what that costs against what it gives.

With a share α of right
guesses, k guesses a row give (1 − α^(k+1)) / (1 − α) tokens a step (Leviathan et al. 2023, arXiv
2211.17192, eq. 1), so the best k is the one with the most tokens for its time. No clock is read.
"""

from __future__ import annotations

FEW = 8
"""Tokens of a step up to which further ones take less: the weights are read once for all."""
TOKEN, TOKEN_OF_MANY = 0.12, 0.17
"""What a further token of a step takes, in steps of one token: ``benchmarks/drafts.py`` with 1 to 8
callers, SmolLM2 in float32 on an Intel Xeon."""
PAUSE, LONGEST_PAUSE = 16, 256
"""Steps before the first trial while guesses do not pay, and between two, which are ever rarer."""
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
        self._paused, self._pause = 0, PAUSE

    def tokens(self, rows: int, most: int) -> int:
        """Guesses of each of ``rows`` rows, at most ``most``; 0 while they do not pay.

        Where they would if all were right, one is tried from time to time.
        """
        best = self._best(rows, most, self._right / self._tried)
        if best:
            self._paused, self._pause = 0, PAUSE
        elif self._best(rows, most, 1.0):
            self._paused += 1
            if self._paused == self._pause:
                self._paused, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
                return 1
        return best

    def count(self, guessed: int, accepted: int) -> None:
        """Counts the guesses of a row that were checked, and those of them that were right."""
        tried = min(guessed, accepted + 1)  # what comes behind a wrong one says nothing
        self._right = _MEMORY**tried * self._right + accepted
        self._tried = _MEMORY**tried * self._tried + tried

    def _best(self, rows: int, most: int, share: float) -> int:
        """The number with the most tokens for its time, of guesses of which ``share`` are right."""

        def rate(count: int) -> float:
            made = sum(share**place for place in range(count + 1))
            return made / (_time(rows * (1 + count)) + count * self._cost * _time(rows))

        return max(range(most + 1), key=rate)


def _time(tokens: int) -> float:
    few = min(tokens, FEW)
    return 1.0 + TOKEN * (few - 1) + TOKEN_OF_MANY * (tokens - few)
