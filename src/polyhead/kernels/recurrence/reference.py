"""The reference as a kernel: does everything, one token after the other."""

from __future__ import annotations

from torch import Tensor

from polyhead.kernels.recurrence.base import RecurrenceKernel
from polyhead.semantics.recurrence import recur
from polyhead.semantics.recurrence_call import RecurrenceCall


class ReferenceKernel(RecurrenceKernel):
    name = "reference"
    summary = "the formula itself, token by token; for gradients it keeps a state for every token"

    def plan(self, call: RecurrenceCall) -> None:
        return None

    def run(self, call: RecurrenceCall) -> tuple[Tensor, Tensor]:
        return recur(call)
