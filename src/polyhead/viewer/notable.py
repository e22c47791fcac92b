"""Heads with a known function on one text: what a page suggests to look at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.interpret.finding import CRITERIA

if TYPE_CHECKING:
    from polyhead.interpret.probe import Probe
    from polyhead.interpret.source_alignment import SourceAlignment

_NAMED = 3
"""Most heads that are named of each kind."""

_REPEATS = 3
"""Least number of repeated tokens for a meaningful mean over them."""


def notable_heads(seen: Probe, ids: Sequence[int]) -> dict[str, Any]:
    """Heads that earn a label of ``CRITERIA`` on this text, the highest score first.

    Args:
        seen: A run of a model on one text.

    Returns:
        ``induction`` and ``previous_token``: up to three ``[layer, head, score]`` each. Induction
        is the mean weight on what followed earlier copies, over the tokens that have some.
        ``sinks``: how many heads rest on the first token, of ``all``.
    """
    before: set[int] = set()
    repeated = []
    for place, token in enumerate(ids):
        if token in before:
            repeated.append(place)
        before.add(token)
    previous, first, induction = [], [], []
    for view in seen:
        summary = view.summary()
        previous.append(summary.previous_token)
        first.append(summary.first_token)
        if len(repeated) >= _REPEATS:
            induction.append(view.measure(["induction"])["induction"][0][:, repeated].mean(-1))
    least = CRITERIA["sink"].threshold
    return {
        "induction": _best(induction, CRITERIA["induction"].threshold),
        "previous_token": _best(previous, CRITERIA["previous-token"].threshold),
        "sinks": sum(int((scores >= least).sum()) for scores in first),
        "all": sum(len(scores) for scores in first),
    }


def _best(scores: Sequence[Tensor], least: float) -> list[list[Any]]:
    found = [
        [layer, head, round(float(values[head]), 4)]
        for layer, values in enumerate(scores)
        for head in torch.nonzero(values >= least).flatten().tolist()
    ]
    return sorted(found, key=lambda entry: -entry[2])[:_NAMED]


def aligning_heads(found: SourceAlignment, first: int, count: int) -> dict[str, Any]:
    """Heads of cross-attention that follow the source token by token, the best first.

    Args:
        first: Number of the first layer of cross-attention among all layers.

    Returns:
        ``alignment``: up to three ``[layer, head, score]``; ``all``: their number.
    """
    best = [
        [first + layer, head, round(float(found.scores[layer, head]), 4)]
        for layer, head in found.heads[:_NAMED]
    ]
    return {"induction": [], "previous_token": [], "alignment": best, "sinks": 0, "all": count}
