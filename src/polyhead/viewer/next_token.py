"""The next token after a text: probabilities at any temperature and top-k, from few numbers.

    p_i(t) = exp(logit_i / t − Z(t))         Z(t) = ln Σ exp(logit / t)

The likeliest tokens are the same at every temperature. So a page is exact with their logits and one
Z for each temperature that it offers, without the rest of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from polyhead._utils.texts.labels import visible

TEMPERATURES = tuple(step / 10 for step in range(1, 21))
"""Temperatures that a page offers, 0.1 to 2."""

LISTED = 64
"""Tokens that are kept: the most that a page's top-k can be."""

Pieces = Callable[[Sequence[int]], Sequence[str]]
"""Ids to texts, as ``Tokenizer.pieces``."""


@dataclass(frozen=True)
class NextToken:
    """The likeliest next tokens of one place in a text.

    Attributes:
        tokens: Up to ``LISTED`` pairs of a token's id and its logit, the greatest first.
        partitions: Z for each of ``TEMPERATURES``, over the whole vocabulary.
    """

    tokens: tuple[tuple[int, float], ...]
    partitions: tuple[float, ...]

    @classmethod
    def of(cls, logits: Tensor) -> Self:
        """The likeliest tokens of ``logits [W]``."""
        exact = logits.detach().double().cpu()
        top = exact.topk(min(LISTED, len(exact)))
        tokens = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return cls(tokens, tuple(float((exact / t).logsumexp(0)) for t in TEMPERATURES))

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """Ids with their probabilities at temperature 1."""
        from math import exp

        total = self.partitions[TEMPERATURES.index(1.0)]
        return [(token, exp(logit - total)) for token, logit in self.tokens[:count]]

    def as_json(self, pieces: Pieces) -> dict[str, Any]:
        """The same for a page."""
        return {
            "tokens": [[visible(pieces([token])[0]), logit] for token, logit in self.tokens],
            "partitions": list(self.partitions),
        }
