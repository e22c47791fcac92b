"""The reference as a kernel: does everything, holds the whole T×S matrix."""

from __future__ import annotations

from polyhead.kernels.base import Kernel, Refusal
from polyhead.semantics import Call, State
from polyhead.semantics.reference import attend
from polyhead.semantics.scores import implicit_replication, is_distributed


class ReferenceKernel(Kernel[None]):
    name = "reference"
    summary = "the formula itself; holds the whole T×S matrix"
    needs_contiguous_kv = True
    takes_normalizers = True

    def plan(self, call: Call) -> Refusal | None:
        if call.spec.deterministic and call.requires_grad:
            return Refusal("deterministic gradients (torch computes them on all threads)")
        masked = call.spec.mask is not None
        if masked and call.requires_grad and is_distributed(*call.tensors().values()):
            return Refusal(
                "gradients of DTensors beside a mask (torch mixes it with them afterwards)"
            )
        return None

    def run(self, call: Call, plan: None) -> State:
        with implicit_replication(*call.tensors().values()):
            return attend(call)
