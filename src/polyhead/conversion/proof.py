"""Verifies exact steps on the given model; a negative control shows that the check can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.conversion.draft import Draft
from polyhead.errors import DisagreementError
from polyhead.models import Transformer

TOLERANCE = 1e-11
"""Greatest difference of float64 logits; relative if they are greater than 1."""

LOUD = 1e-6
"""Least difference that a step broken on purpose must cause."""

_TOKENS = 48


@dataclass(frozen=True)
class ExactStep:
    """One exact step.

    Attributes:
        name: What the step did, such as ``"kv heads copied"``.
        error: Greatest difference of logits in float64 from those before it.
        control: The same of the step broken on purpose (pairs permuted, frequencies not); None
            where a step has no such control.
    """

    name: str
    error: float
    control: float | None = None

    def __str__(self) -> str:
        broken = "" if self.control is None else f"; broken on purpose {self.control:.1e}"
        return f"{self.name}: {self.error:.1e}{broken}"


class Proof:
    """Takes a draft through exact ``steps`` and compares logits in float64 after each."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.steps = draft, list[ExactStep]()
        length = min(_TOKENS, draft.config.max_positions)
        drawn = torch.Generator().manual_seed(0)
        self.ids = torch.randint(
            draft.config.vocab_size, (1, length), generator=drawn, device="cpu"
        )
        self._logits = self._run(draft)

    def step(self, name: str, change: Callable[[Draft], None], *, turns: bool = False) -> ExactStep:
        """Takes a step.

        Args:
            turns: Whether the step moves rotated pairs: then it is proved that frequencies that
                stay behind are noticed.

        Raises:
            DisagreementError: The step is not exact on this model, or the control goes unnoticed.
        """
        change(self.draft)
        error = self._error(self._run(self.draft))
        control = None
        if turns and (broken := _misplaced(self.draft)) is not None:
            control = self._error(self._run(broken))
        done = ExactStep(name, error, control)
        if not error <= TOLERANCE:
            raise DisagreementError(
                f"{name} is not exact on this model: float64 logits differ by {error:.1e}, more "
                f"than {TOLERANCE:g}; nothing was converted"
            )
        if control is not None and not control > LOUD:
            raise DisagreementError(
                f"{name}: frequencies in the wrong order change logits by {control:.1e} alone, so "
                "the comparison proves nothing"
            )
        self.steps.append(done)
        return done

    def _run(self, draft: Draft) -> Tensor:
        model: Transformer = draft.build(torch.float64)
        with torch.no_grad():
            logits: Tensor = model(self.ids)
        return logits

    def _error(self, logits: Tensor) -> float:
        size = max(1.0, float(self._logits.abs().max()))
        return float((logits - self._logits).abs().max()) / size


def _misplaced(draft: Draft) -> Draft | None:
    """The draft with the frequencies of each layer one place further on; None: nothing rotates."""
    broken, found = draft.copy(), False
    config: TransformerConfig = draft.config
    for index, layer in enumerate(config.layers):
        rope = layer.attention.rope
        if rope is None or rope.frequencies is None or len(set(rope.frequencies)) < 2:
            continue
        moved = (*rope.frequencies[1:], rope.frequencies[0])
        attention = replace(layer.attention, rope=replace(rope, frequencies=moved))
        broken.set_attention(index, attention)
        found = True
    return broken if found else None
