"""The interface of kernels: each decides once what it would run, or names what it cannot do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from polyhead.errors import PolyheadError
from polyhead.semantics import Call, State

Plan = TypeVar("Plan")
"""What a kernel has prepared for a call: ranges of the mask, numbers of the bias."""


class Refusal(NamedTuple):
    """The feature of a call that a kernel cannot do, named."""

    feature: str


class SwitchedOffError(PolyheadError, RuntimeError):
    """A kernel found while it ran that it cannot compute here; it is not chosen again."""


class Kernel(ABC, Generic[Plan]):
    """One way to compute attention."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``explain`` and ``doctor``: what this kernel is good at."""
    needs_contiguous_kv: ClassVar[bool] = False
    """Whether it reads K and V as one tensor each, so that some sources are copied."""

    takes_normalizers: ClassVar[bool] = False
    """Whether it computes weights other than the softmax's (``Specification.normalizer``)."""

    checks_storage: ClassVar[bool] = False
    """Whether the kernel itself checks that storage is large enough for what it reads."""

    def plan_of(self, call: Call) -> Plan | Refusal:
        """``plan``, for any call."""
        if call.spec.normalizer is not None and not self.takes_normalizers:
            return Refusal(f"normalizer={call.spec.normalizer!r} (it computes the softmax)")
        return self.plan(call)

    def unavailable(self) -> str | None:
        """Why this kernel cannot run here and the command that would change it, or None."""
        return None

    def auto_skip_reason(self, call: Call) -> str | None:
        """Why ``auto`` skips this kernel for ``call`` although it supports it, or None."""
        return None

    @abstractmethod
    def plan(self, call: Call) -> Plan | Refusal:
        """What it would run for ``call``, or the first feature that it cannot do.

        A normalizer is asked about before (``plan_of``).
        """

    @abstractmethod
    def run(self, call: Call, plan: Plan) -> State:
        """Computes a call by its own plan of it; lse is set where ``call.needs_lse``."""

    def gradients(
        self, call: Call, plan: Plan, result: State, grads: tuple[Tensor, Tensor]
    ) -> list[Tensor] | None:
        """Gradients of q, k and v, and of the bias's tensors if any of these requires a gradient.

        Weights are measured against the lse of ``result``, so it may be of more keys than those of
        ``call``: states were merged. None: this kernel has no backward pass apart from autograd's.

        Args:
            call: A call on a ``DenseSource``.
            plan: This kernel's own plan of it.
            result: out in the dtype of q, and lse, of all keys.
            grads: The gradients of both.
        """
        return None
