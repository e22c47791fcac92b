"""The interface of the recurrence's kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from polyhead.kernels.base import Refusal
from polyhead.semantics.recurrence_call import RecurrenceCall


class RecurrenceKernel(ABC):
    """One way to compute a recurrence."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``explain_recurrence``: what this kernel is good at."""

    def unavailable(self) -> str | None:
        """Why this kernel cannot run here and the command that would change it, or None."""
        return None

    @abstractmethod
    def plan(self, call: RecurrenceCall) -> Refusal | None:
        """The first feature of ``call`` that it cannot do, or None; there is nothing to prepare."""

    @abstractmethod
    def run(self, call: RecurrenceCall) -> tuple[Tensor, Tensor]:
        """``out [B, H, T, V]`` in q's dtype and the last state ``[B, H, K, V]``.

        Of a call ``in_place`` the state may be the one that was given, overwritten.
        """
