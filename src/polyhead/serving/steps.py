"""What a step computes for rows of one call: what each reads next, and guesses that it checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.checkpoints import RowAdapters
from polyhead.generation import LanguageModel
from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.serving.row import Row
from polyhead.serving.stats import Counts


def guesses_of(rows: Sequence[Row], read: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """What may come next in rows of one call that has room for it, at most ``most`` tokens.

    Args:
        rows: Those of the call.
        read: What each reads in it; one that reads its prompt guesses nothing.
        most: Guesses of a row.
    """
    room = MAX_STEP_ROWS - sum(map(len, read))
    if min(most, room) < 1:
        return [[] for _ in rows]
    guesses = [[] if row.reads else row.guess(most) for row in rows]
    while sum(map(len, guesses)) > room:
        most -= 1
        guesses = [guess[:most] for guess in guesses]
    return guesses


def logits_of(
    model: LanguageModel,
    adapters: RowAdapters,
    cache: ModelCache | None,
    rows: Sequence[Row],
    read: Sequence[Sequence[int]],
    guesses: Sequence[Sequence[int]],
) -> list[Tensor]:
    """For each row logits ``[1 + n, V]`` after what it reads, and after each of its n guesses.

    Without a cache of them together there is one row, which has its own.
    """
    if cache is None:
        return [logits_alone(model, adapters, rows[0], 1)]
    with adapters.rows([row.adapter for row in rows]):
        return _logits_of(model, cache, read, guesses)


def _logits_of(
    model: LanguageModel,
    cache: ModelCache,
    read: Sequence[Sequence[int]],
    guesses: Sequence[Sequence[int]],
) -> list[Tensor]:
    tokens = [[*ids, *guess] for ids, guess in zip(read, guesses, strict=True)]
    transformer = model.transformer
    if max(map(len, tokens)) == 1:
        return [*transformer(torch.tensor(tokens, device="cpu"), cache=cache, last=1)]
    counts = [*map(len, tokens)]
    ids = torch.tensor([[token for row in tokens for token in row]], device="cpu")
    hidden = transformer.hidden_states(ids, cache=cache, counts=counts)
    wanted = [1 + len(guess) for guess in guesses]
    ends = zip(accumulate(counts), wanted, strict=True)
    places = [place for end, count in ends for place in range(end - count, end)]
    logits: Tensor = transformer.logits(hidden[:, places])
    return [*torch.split(logits[0], wanted)]


def logits_alone(model: LanguageModel, adapters: RowAdapters, row: Row, count: int) -> Tensor:
    """Logits ``[1, V]`` after the next ``count`` tokens of a row with a cache of its own."""
    assert row.cache is not None
    ids = torch.tensor([row.next_ids(count)], device="cpu")
    with adapters.rows([row.adapter]):
        logits: Tensor = model.transformer(ids, cache=row.cache, last=1)
    return logits[0]


def feed(row: Row, count: int, counts: Counts) -> None:
    """Counts tokens of a row that its cache now holds."""
    before = row.read
    row.feed(count)
    counts.prompt_tokens += row.read - before


def take(row: Row, logits: Tensor, counts: Counts) -> None:
    """Draws a token of a row from ``logits [1, V]``."""
    after = len(row.ids) + 1
    counts.output_tokens += 1  # before its caller hears of it
    row.take(logits)
    counts.output_tokens -= after - len(row.ids)


def take_guessed(row: Row, guess: Sequence[int], logits: Tensor, counts: Counts) -> int:
    """Draws from ``logits [1 + n, V]`` while the tokens are the guess.

    Returns:
        Guesses that its cache is to keep.
    """
    right = 0
    row.lookup.count(len(guess), 0)  # before its caller hears of its end
    counts.guessed_tokens += len(guess)
    take(row, logits[:1] if guess else logits, counts)
    while not row.ended and right < len(guess) and row.ids[-1] == guess[right]:
        right += 1
        row.lookup.count(0, 1)
        counts.accepted_tokens += 1
        take(row, logits[right : right + 1], counts)
    row.feed(right)
    return right
