"""polyhead's own kernels for GPUs: ``kernels/triton/device/recurrence.py`` tells how they work."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.kernels.base import Refusal, SwitchedOffError
from polyhead.kernels.recurrence.base import RecurrenceKernel, needs_torch
from polyhead.kernels.triton import TritonKernel, blocks, self_test
from polyhead.kernels.triton.interpreting import interpreting
from polyhead.native.tensor_check import PLAIN
from polyhead.semantics.recurrence_call import RecurrenceCall

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class TritonRecurrence(RecurrenceKernel):
    name = "triton"
    summary = "our own kernels for GPUs: the state stays in registers; no gradients"

    def unavailable(self) -> str | None:
        return TritonKernel().unavailable()

    def auto_skip_reason(self, call: RecurrenceCall) -> str | None:
        if call.q.device.type != "cuda":
            return "on a CPU it is interpreted"
        if self.unavailable() is not None or call.q.dtype not in _DTYPES:
            return None  # ``unavailable`` and ``plan`` say it
        return self_test.unsupported_reason(call.q.device, call.q.dtype, *_compiled_for(call))

    def plan(self, call: RecurrenceCall) -> Refusal | None:
        q, tensors = call.q, call.tensors().values()
        if q.dtype not in _DTYPES:
            return Refusal(str(q.dtype).removeprefix("torch."))
        if q.device.type != "cuda" and not (q.is_cpu and interpreting()):
            return Refusal(f"tensors on {q.device}")
        if (refused := needs_torch(call)) is not None:
            return refused
        for x in tensors:
            if type(x) not in PLAIN:
                return Refusal(f"a {type(x).__name__}")
            if x.is_neg():
                return Refusal("a negated view")
        if q.shape[3] > blocks.LARGEST_STATE:
            return Refusal(f"a key size of {q.shape[3]}")
        return None if q.shape[0] and q.shape[2] else Refusal("no batch rows or no tokens")

    def run(self, call: RecurrenceCall) -> tuple[Tensor, Tensor]:
        from polyhead.kernels.triton import recurrence  # imports Triton

        try:
            return recurrence.recur(call)
        except Exception as error:
            if not self_test.is_of_compiler(error):
                raise
            self_test.switch_off(call.q.device, call.q.dtype, *_compiled_for(call), str(error))
            raise SwitchedOffError(f"kernel 'triton' does not compile here: {error}") from error


def _compiled_for(call: RecurrenceCall) -> tuple[blocks.Parts, self_test.States]:
    """Sizes and kind of the states, which the test at first use goes by."""
    return blocks.state_parts(call.q.shape[3], call.v.shape[3]), self_test.States.of(call)
