"""OpenAI's changes of logits, as rules of generation.

Shape letters: N rows, V vocabulary size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from polyhead.generation.decoding.rules import Rows, Rule


def biased(biases: Mapping[int, float]) -> Rule:
    """Adds a number to the logits of some tokens (``logit_bias``)."""
    tokens, values = [*biases], [*biases.values()]

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, tokens] += torch.tensor(values, dtype=scores.dtype, device=scores.device)
        return scores

    return rule


def penalised(frequency: float, presence: float) -> Rule:
    """Lowers the logits of tokens that were written (the prompt does not count).

    logit − count · ``frequency`` − (count > 0) · ``presence``, as OpenAI's API defines it.
    """

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids, prompt in zip(scores, rows.ids, rows.prompts, strict=True):
            counts = Counter(ids[prompt:])
            if counts:
                lower = [count * frequency + presence for count in counts.values()]
                row[[*counts]] -= torch.tensor(lower, dtype=row.dtype, device=row.device)
        return scores

    return rule
