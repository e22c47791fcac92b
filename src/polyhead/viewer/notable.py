"""What is worth seeing on one text: what the terminal says, and what a page opens with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from polyhead._utils.texts import Texts
from polyhead._utils.texts.labels import head_name, label
from polyhead.interpret.habits import Habit, habits
from polyhead.interpret.shuffles import Shuffles
from polyhead.interpret.standing_out import ALLOWED, StandingOut, StandingPair, standing_out

if TYPE_CHECKING:
    from polyhead.interpret.heads import TokenizedText
    from polyhead.interpret.probe import Probe
    from polyhead.interpret.source_alignment import SourceAlignment

_NAMED = 3
"""Most heads that are named of each kind."""

_PAIRS = 5
"""Most pairs that a page names."""


@dataclass(frozen=True)
class Findings:
    """What heads do on a text, beside what they do on shuffles of it.

    Attributes:
        standing: Pairs of tokens whose weight is not predicted.
        habits: Every head's, layer by layer.
    """

    shuffles: Shuffles
    standing: StandingOut
    habits: list[Habit]

    @classmethod
    def of(cls, model: nn.Module, tokens: TokenizedText, seen: Probe, *, causal: bool) -> Self:
        """Runs a model on shuffles of a text that it has read.

        Args:
            seen: The run on the text.
            causal: Whether a token sees only itself and what is before it.
        """
        shuffles = Shuffles.of(model, tokens, causal=causal)
        found = standing_out(seen, tokens, shuffles)
        return cls(shuffles, found, habits(seen, tokens, shuffles))

    @property
    def more(self) -> bool:
        """Whether more weights stand out than in shuffled text."""
        return bool(self.standing.found()) and self.standing.rate > ALLOWED

    def by_kind(self) -> dict[str, list[Habit]]:
        """The heads with each habit, the largest share first; the commonest habit first."""
        kinds: dict[str, list[Habit]] = {}
        for habit in sorted(self.habits, key=lambda each: -each.share):
            if habit.kind is not None:
                kinds.setdefault(habit.kind, []).append(habit)
        return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))

    def as_json(self) -> dict[str, Any]:
        """For a page: pairs, and the habit of every head by layer."""
        pairs = [
            {"head": [pair.layer, pair.head], "query": pair.query, "key": pair.key,
             "weight": pair.weight, "times": pair.times, "near": pair.by_distance,
             "shuffled": pair.shuffled, "others": pair.others}
            for pair in self.standing.found()[:_PAIRS]
        ]  # fmt: skip
        rows: dict[int, list[list[Any]]] = {}
        for each in self.habits:
            numbers = each.share, each.even, each.shuffled
            rounded = [None if x is None else round(x, 4) for x in numbers]
            found = [each.kind, each.nearest, *rounded, each.distance]
            rows.setdefault(each.layer, []).append(found)
        return {"pairs": pairs, "more": self.more, "habits": list(rows.values())}


def say_habit(habit: Habit, said: Texts) -> str:
    """A sentence on a head's habit; ``said`` has the texts of ``"statistics"``."""
    frame = "habit.says_even" if habit.kind == "even" else "habit.says"
    return said(
        "habit.says_none" if habit.kind is None else frame,
        share=f"{habit.share:.2f}",
        place=place_of(habit.nearest, habit.distance, said),
        even=f"{habit.even:.2f}",
        shuffled=_number(habit.shuffled),
    )


def place_of(kind: str, distance: int, said: Texts) -> str:
    """The keys of a kind of habit, in words."""
    name = "ahead" if kind == "distance" and distance < 0 else kind
    return said(f"habit.{name}", distance=abs(distance))


def say_pair(pair: StandingPair, pieces: Sequence[str], said: Texts) -> str:
    """A sentence on a pair that stands out; ``said`` has the texts of ``"statistics"``."""
    return said(
        "pair.says",
        head=head_name(pair.layer, pair.head),
        query=f"'{label(pieces[pair.query])}'",
        key=f"'{label(pieces[pair.key])}'",
        weight=f"{pair.weight:.2f}",
        times=f"{pair.times:.0f}",
        near=f"{pair.by_distance:.2f}",
        shuffled=_number(pair.shuffled),
        others=f"{pair.others:.2f}",
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def aligning_heads(found: SourceAlignment, first: int) -> dict[str, Any]:
    """Heads of cross-attention that follow the source token by token, the best first.

    Args:
        first: Number of the first layer of cross-attention among all layers.

    Returns:
        ``alignment``: up to three ``[layer, head, score]``.
    """
    best = [
        [first + layer, head, round(float(found.scores[layer, head]), 4)]
        for layer, head in found.heads[:_NAMED]
    ]
    return {"alignment": best}
