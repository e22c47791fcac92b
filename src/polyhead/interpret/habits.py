"""What each head does with most of its weight on one text, beside what chance would do.

A habit is a kind of keys that gets a large share of a head's weight. Two controls stand beside
each share: the same if every query spread its weight evenly over the keys that it sees, and the
same on shuffles of the text. The first tells a habit from a short text, the second what the order
of the words has to do with it: a head that looks one token back does so in a shuffle too.

A share counts from the thresholds of ``finding.CRITERIA``, and where it is at least twice that of
even attention. Of words named at random, 3 in 100 heads of SmolLM2 would have a habit
(``tests/interpret/test_standing_out.py``).

Letters: B texts, H query heads, T tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.interpret.finding import CRITERIA
from polyhead.interpret.heads import TokenizedText
from polyhead.interpret.measuring import measure
from polyhead.interpret.probe import Probe
from polyhead.interpret.shuffles import Shuffles, special_tokens
from polyhead.interpret.view import AttentionView

THRESHOLDS: Mapping[str, float] = {
    "first": CRITERIA["sink"].threshold,
    "previous": CRITERIA["previous-token"].threshold,
    "self": CRITERIA["previous-token"].threshold,
    "induction": CRITERIA["induction"].threshold,
    "duplicate": CRITERIA["duplicate"].threshold,
    "punctuation": CRITERIA["induction"].threshold,
    "special": CRITERIA["sink"].threshold,
    "distance": CRITERIA["previous-token"].threshold,
    "even": 0.9,
}
"""The least share of each kind; of ``even`` the entropy as a share of the greatest possible."""

TIMES_EVEN = 2.0
"""A share is at least so many times that of even attention."""

SHORTEST = 5
"""Tokens of a text on which a head can be said to have a habit."""

_REPEATS = 3
"""Least number of tokens that have an earlier copy, for a mean over them."""


@dataclass(frozen=True)
class Habit:
    """What one head does with most of its weight on a text.

    Attributes:
        kind: A name of ``THRESHOLDS``; None where no share reaches its threshold.
        share: Mean weight on keys of that kind; without a kind the largest that there is, None
            where nothing could be measured. Of ``"induction"`` and ``"duplicate"`` over the tokens
            that have an earlier copy.
        even: The same of even attention.
        shuffled: The same on shuffles of the text; None where they have no such keys.
        nearest: The kind with the largest share beside its threshold, also where it has no habit.
        distance: Of ``"distance"``: tokens back; negative for later tokens.
    """

    layer: int
    head: int
    kind: str | None
    share: float
    even: float
    shuffled: float | None
    nearest: str
    distance: int = 0


class _Share(NamedTuple):
    """``[H]`` the shares of one kind, that of even attention, and distances where they matter."""

    share: Tensor
    even: float
    distance: Tensor | None = None


def habits(seen: Probe, tokens: TokenizedText, shuffles: Shuffles) -> list[Habit]:
    """What every head does on a text, layer by layer.

    Args:
        seen: A run of a model on the text.
        shuffles: The same model on shuffles of it.
    """
    marks = _Marks.of(tokens, torch.arange(len(tokens.ids))[None], shuffles.causal)
    control = _Marks.of(tokens, shuffles.order, shuffles.causal)
    found = []
    for layer, view, beside in zip(seen.layers, seen, shuffles.seen, strict=True):
        here = dict(_shares(view, marks))
        there = dict(_shares(beside, control, here.get("distance")))
        found += [_habit(layer, head, here, there) for head in range(len(view.heads))]
    return found


def _habit(layer: int, head: int, here: Mapping[str, _Share], there: Mapping[str, _Share]) -> Habit:
    shares = {
        kind: (float(found.share[head]), found.even)
        for kind, found in here.items()
        if found.share[head] == found.share[head]
    }
    if not shares:
        return Habit(layer, head, None, 0.0, 0.0, None, "first")
    held = [kind for kind, numbers in shares.items() if _is_habit(kind, *numbers)]
    # Few tokens repeat, so what a head does with them counts before what it does with all others;
    # a head that spreads evenly is one that does nothing else.
    order = {"induction": 2, "duplicate": 2, "even": 0}
    most = max(
        held or shares,
        key=lambda kind: (order.get(kind, 1) if held else 1 - (kind == "even"), shares[kind][0]),
    )
    share, even = shares[most]
    shuffled = float(there[most].share[head]) if most in there else torch.nan
    distance = here[most].distance
    return Habit(
        layer=layer,
        head=head,
        kind=most if held else None,
        share=share,
        even=even,
        shuffled=shuffled if shuffled == shuffled else None,
        nearest=most,
        distance=0 if distance is None else int(distance[head]),
    )


def _is_habit(kind: str, share: float, even: float) -> bool:
    return share >= THRESHOLDS[kind] and (kind == "even" or share >= TIMES_EVEN * even)


@dataclass
class _Marks:
    """Which tokens are of which kind, ``[B, T]`` each, and how many of them each query sees.

    Attributes:
        keys: How many keys each query sees, ``[T]``.
        copies: Earlier copies of each token; none of the first token's.
    """

    special: Tensor
    punctuation: Tensor
    copies: Tensor
    keys: Tensor
    causal: bool

    @classmethod
    def of(cls, tokens: TokenizedText, order: Tensor, causal: bool) -> _Marks:
        length = order.shape[1]
        special = special_tokens(tokens)[order]
        special[:, 0] = False  # the first token is a kind of its own
        said = (tokens.text[start:stop] for start, stop in tokens.spans)
        punctuation = torch.tensor([is_punctuation(text) for text in said])[order]
        punctuation[:, 0] = False
        keys = torch.arange(1, length + 1) if causal else torch.full((length,), length)
        ids = torch.tensor(tokens.ids)[order]
        # Of a copy in the first place nobody could say why it is looked at.
        copies = torch.stack([_earlier(row) for row in ids]).masked_fill(ids == ids[:, :1], 0)
        return cls(special, punctuation, copies, keys, causal)

    def even(self, marked: Tensor) -> float:
        """The share of marked keys for even attention, over all queries but the first."""
        seen = marked.float().cumsum(1) if self.causal else marked.float().sum(1, keepdim=True)
        return float((seen / self.keys)[:, 1:].mean())


def _earlier(ids: Tensor) -> Tensor:
    counts: dict[int, int] = {}
    found = []
    for token in ids.tolist():
        found.append(counts.get(token, 0))
        counts[token] = found[-1] + 1
    return torch.tensor(found)


def is_punctuation(text: str) -> bool:
    """Whether a token is punctuation or a line break, and nothing else."""
    said = text.strip()
    if not said:
        return "\n" in text
    return all(unicodedata.category(sign).startswith("P") for sign in said)


def _shares(
    view: AttentionView, marks: _Marks, distances: _Share | None = None
) -> Iterator[tuple[str, _Share]]:
    """The share of each kind that a text has; at ``distances`` where they are given."""
    if marks.keys.shape[0] < SHORTEST:
        return
    summary, once = view.summary(), float((1 / marks.keys.float())[1:].mean())
    yield "first", _Share(summary.first_token.cpu(), once)
    yield "previous", _Share(summary.previous_token.cpu(), once)
    yield "self", _Share(summary.self.cpu(), once)
    repeated = marks.copies > 0
    if int(repeated.sum()) >= _REPEATS:
        even = float((marks.copies / marks.keys)[repeated].mean())
        for kind in ("induction", "duplicate"):
            rows = view.measure([kind])[kind].float().cpu().transpose(1, 2)
            yield kind, _Share(rows[repeated].mean(0), even)
    found = measure(view.call, ("received", "top_weights", "top_keys"), 4)
    received = found["received"].float().cpu()
    if marks.causal:
        received[..., 0] -= 1.0  # the first query sees only itself, whatever the head does
    total = received.sum((0, 2))
    for kind, marked in (("punctuation", marks.punctuation), ("special", marks.special)):
        if marked.any():
            part = (received * marked[:, None]).sum((0, 2)) / total
            yield kind, _Share(part, marks.even(marked))
    yield from _at_distance(found["top_weights"].cpu(), found["top_keys"].cpu(), once, distances)
    # Even attention is one key more for every sink of the call's own, which is not counted here.
    greatest = marks.keys.float().log()[1:].mean()
    yield "even", _Share(summary.entropy.float().cpu() / greatest, 1.0)


def _at_distance(
    weights: Tensor, keys: Tensor, even: float, given: _Share | None
) -> Iterator[tuple[str, _Share]]:
    """The mean weight at the distance of 2 or more, or ahead, that gets most of it."""
    batch, heads, length, _ = weights.shape
    apart = torch.arange(length)[:, None] - keys
    counted = (keys > 0) & (apart != 0) & (apart != 1)
    sums = torch.zeros(heads, 2 * length)
    places = torch.where(counted, apart % (2 * length), 0).transpose(0, 1).flatten(1)
    kept = weights.float().masked_fill(~counted, 0.0).transpose(0, 1).flatten(1)
    sums.scatter_add_(1, places, kept)
    signed = torch.arange(2 * length)
    signed = torch.where(signed < length, signed, signed - 2 * length)
    # A query at place d or later has a key d back that is not the first.
    queries = (length - signed.abs() - (signed > 0).long()).clamp(min=0)
    mean = sums / (batch * queries.clamp(min=1))
    mean[:, queries < max(_REPEATS, length // 2)] = 0.0
    best = mean.argmax(1) if given is None or given.distance is None else given.distance
    best = best % (2 * length)
    yield "distance", _Share(mean.gather(1, best[:, None])[:, 0], even, signed[best])
