"""What a step computes for rows of one call: a token for each, and guesses that it checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.generation import LanguageModel
from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.serving.lookup import width
from polyhead.serving.row import Row
from polyhead.serving.stats import Counts


def guesses_of(rows: Sequence[Row], most: int) -> list[list[int]]:
    """What may come next in rows of one call, at most ``most`` tokens, as far as it is worth it."""
    most = min(most, MAX_STEP_ROWS // len(rows) - 1)
    if most < 1:
        return [[] for _ in rows]
    guesses = [row.guess(most) for row in rows]
    wide = width(guesses, most)
    return [guess[:wide] for guess in guesses]


def logits_of(
    model: LanguageModel, cache: ModelCache, rows: Sequence[Row], guesses: Sequence[Sequence[int]]
) -> Tensor:
    """Logits ``[rows, 1 + n, V]`` after the last token of each row, and after each of its guesses.

    All rows have n, the most guesses of any; what fills up the others is zeros.
    """
    wide = max(map(len, guesses))
    ids = [
        [row.ids[-1], *guess, *[0] * (wide - len(guess))]
        for row, guess in zip(rows, guesses, strict=True)
    ]
    tokens = torch.tensor(ids, device="cpu")
    logits: Tensor = model.transformer(tokens, cache=cache, last=wide + 1)
    return logits


def take(row: Row, logits: Tensor, counts: Counts) -> None:
    """Draws a token of a row from ``logits [V]``."""
    after = len(row.ids) + 1
    counts.output_tokens += 1  # before its caller hears of it
    row.take(logits.reshape(1, -1))
    counts.output_tokens -= after - len(row.ids)


def take_guessed(row: Row, guess: Sequence[int], logits: Tensor, counts: Counts) -> int:
    """Draws from ``logits [1 + n, V]`` while the tokens are the guess.

    Returns:
        Number of tokens after the row's last that its cache is to keep.
    """
    right = 0
    row.lookup.count(len(guess), 0)  # before its caller hears of its end
    counts.guessed_tokens += len(guess)
    take(row, logits[0], counts)
    while not row.ended and right < len(guess) and row.ids[-1] == guess[right]:
        right += 1
        row.lookup.count(0, 1)
        counts.accepted_tokens += 1
        take(row, logits[right], counts)
    row.feed(1 + right)
    return right
