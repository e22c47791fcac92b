"""Log-probabilities of tokens, by the logits that they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """A token that was written.

    Attributes:
        token: Its id.
        logprob: Its log-probability by the model's logits, before rules and temperature.
        top: The likeliest tokens in its place with theirs, the best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The log-probability of a token of each row of ``logits [N, V]``, in float32.

    Args:
        logits: Before rules and temperature.
        tokens: One for each row.
        count: Likeliest tokens that are told beside each.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(count)
    places = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [tuple(zip(*row, strict=True)) for row in places]
    drawn = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    return [TokenLogprobs(*each) for each in zip(tokens, drawn, tops, strict=True)]


class LogprobRecord:
    """The log-probabilities of rows whose tokens are drawn one after the other.

    Args:
        count: As of ``logprobs_of``.
        rows: How many rows there are.

    Attributes:
        rows: One for each token of each row.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.rows: list[list[TokenLogprobs]] = [[] for _ in range(rows)]
        self._count = count

    def add(self, rows: Sequence[int], logits: Tensor, tokens: Sequence[int]) -> None:
        """Notes the next token of some rows, drawn from ``logits [N, V]``."""
        for row, told in zip(rows, logprobs_of(logits, tokens, self._count), strict=True):
            self.rows[row].append(told)
