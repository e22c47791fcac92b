"""The interface of the recurrence's kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from polyhead.kernels.base import Refusal
from polyhead.native.tensor_check import is_fake
from polyhead.semantics.recurrence_call import RecurrenceCall
from polyhead.semantics.tokens import is_traced


class RecurrenceKernel(ABC):
    """One way to compute a recurrence."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``explain_recurrence``: what this kernel is good at."""

    def unavailable(self) -> str | None:
        """Why this kernel cannot run here and the command that would change it, or None."""
        return None

    def auto_skip_reason(self, call: RecurrenceCall) -> str | None:
        """Why ``auto`` skips this kernel for ``call`` although it supports it, or None."""
        return None

    @abstractmethod
    def plan(self, call: RecurrenceCall) -> Refusal | None:
        """The first feature of ``call`` that it cannot do, or None; there is nothing to prepare."""

    @abstractmethod
    def run(self, call: RecurrenceCall) -> tuple[Tensor, Tensor]:
        """``out [B, H, T, V]`` in q's dtype and the last state ``[B, H, K, V]``.

        Of a call ``in_place`` the state may be the one that was given, overwritten.
        """


def needs_torch(call: RecurrenceCall) -> Refusal | None:
    """What only operations of torch can do: gradients, transforms, graphs, tensors without numbers.

    For kernels that read and write memory.
    """
    if call.requires_grad:
        return Refusal("gradients")
    if torch.compiler.is_compiling():
        return Refusal("torch.compile")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return Refusal("torch.func")
    if torch.autograd.forward_ad._current_level >= 0:
        return Refusal("forward-mode derivatives")
    if is_fake(call.tensors().values()):
        return Refusal("tensors without numbers, or a mode that watches operations")
    return Refusal("torch.jit.trace") if is_traced(call.q) else None
