"""What a step computes for rows of one call, and the tokens that each row draws from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.checkpoints import RowAdapters
from polyhead.generation import LanguageModel
from polyhead.serving.row import Row
from polyhead.serving.stats import Counts


class Computed(NamedTuple):
    """What a model computes for a row.

    Attributes:
        logits: ``[1 + n, V]`` after what the row reads, and after each of its n guesses.
        hidden: Hidden states ``[T, E]`` of the tokens that it reads, and of the guesses; of the
            last token alone where nobody wants the others.
    """

    logits: Tensor
    hidden: Tensor


def compute(
    model: LanguageModel,
    adapters: RowAdapters,
    cache: ModelCache | None,
    rows: Sequence[Row],
    read: Sequence[Sequence[int]],
    guesses: Sequence[Sequence[int]],
) -> list[Computed]:
    """What the model computes for rows in a cache, which read tokens and check guesses.

    Without a cache of them together there is one row, which has its own.
    """
    if cache is None:
        return [compute_alone(model, adapters, rows[0], 1)]
    tokens = [[*ids, *guess] for ids, guess in zip(read, guesses, strict=True)]
    counts, wanted = [*map(len, tokens)], [1 + len(guess) for guess in guesses]
    transformer = model.transformer
    with adapters.rows([row.adapter for row in rows]):
        if max(counts) == 1:
            ids = torch.tensor(tokens, device="cpu")
            hidden = transformer.hidden_states(ids, cache=cache, last=1)
            return [*map(Computed, transformer.logits(hidden), hidden)]
        ids = torch.tensor([[token for row in tokens for token in row]], device="cpu")
        hidden = transformer.hidden_states(ids, cache=cache, counts=counts)
        ends = zip(accumulate(counts), wanted, strict=True)
        places = [place for end, count in ends for place in range(end - count, end)]
        logits = transformer.logits(hidden[:, places])
    split = torch.split(logits[0], wanted), torch.split(hidden[0], counts)
    return [*map(Computed, *split)]


def compute_alone(
    model: LanguageModel,
    adapters: RowAdapters,
    row: Row,
    count: int,
    *,
    wants_hidden: bool = False,
) -> Computed:
    """The same for the next ``count`` tokens of a row with a cache of its own."""
    assert row.cache is not None
    ids = torch.tensor([row.next_ids(count)], device="cpu")
    with adapters.rows([row.adapter]):
        last = None if wants_hidden else 1
        hidden = model.transformer.hidden_states(ids, cache=row.cache, last=last)
        return Computed(model.transformer.logits(hidden[:, -1:])[0], hidden[0])


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
    row.guessed += len(guess)  # before its caller hears of its end
    counts.guessed_tokens += len(guess)
    take(row, logits[:1] if guess else logits, counts)
    while not row.ended and right < len(guess) and row.ids[-1] == guess[right]:
        right += 1
        row.accepted += 1
        counts.accepted_tokens += 1
        take(row, logits[right : right + 1], counts)
    row.feed(right)
    return right
