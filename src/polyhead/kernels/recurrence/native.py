"""polyhead's own C++ kernel for CPUs: csrc/recurrence/recur.h tells how it works.

A row has the same bits whatever is beside it in the batch, however a sequence is cut into calls,
and on any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead import native
from polyhead.kernels.base import Refusal
from polyhead.kernels.recurrence.base import RecurrenceKernel
from polyhead.native.arguments import DTYPES
from polyhead.native.tensor_check import is_fake, unsupported_tensor_kind
from polyhead.semantics.recurrence_call import RecurrenceCall
from polyhead.semantics.tokens import is_traced


class NativeKernel(RecurrenceKernel):
    name = "native"
    summary = "C++ for CPUs: token by token, a part of the state in the first cache; no gradients"

    def unavailable(self) -> str | None:
        return native.unavailable()

    def plan(self, call: RecurrenceCall) -> Refusal | None:
        q, tensors = call.q, call.tensors().values()
        if q.dtype not in DTYPES:
            return Refusal(str(q.dtype).removeprefix("torch."))
        if not q.is_cpu:
            return Refusal(f"tensors on {q.device}")
        if call.requires_grad:
            return Refusal("gradients")
        if torch.compiler.is_compiling():
            return Refusal("torch.compile")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return Refusal("torch.func")
        if torch.autograd.forward_ad._current_level >= 0:
            return Refusal("forward-mode derivatives")
        if is_fake(tensors):
            return Refusal("tensors without numbers, or a mode that watches operations")
        if (kind := unsupported_tensor_kind(tensors)) is not None:
            return Refusal(kind)
        if is_traced(q):
            return Refusal("torch.jit.trace")
        return None

    def run(self, call: RecurrenceCall) -> tuple[Tensor, Tensor]:
        code = native.code(call.q.dtype)
        if code is None:
            raise RuntimeError(native.unavailable())
        state = call.first_state()
        if call.state is not None and not (call.in_place and state.is_contiguous()):
            state = state.clone(memory_format=torch.contiguous_format)
        decay, beta = call.log_decay(), call.beta
        q, k, v = (_dense(x) for x in (call.q, call.k, call.v))
        out = code.recur(
            q,
            k,
            v,
            call.scale,
            None if decay is None else _dense(decay.exp()),
            None if beta is None else beta.float(),
            call.real,
            state,
            delta=call.delta,
        )
        return out, state


def _dense(x: Tensor) -> Tensor:
    """x with a last dimension without gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
