"""polyhead's own C++ kernel for CPUs: csrc/recurrence/recur.h tells how it works.

A row has the same bits whatever is beside it in the batch, however a sequence is cut into calls,
and on any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead import native
from polyhead.kernels.base import Refusal
from polyhead.kernels.recurrence.base import RecurrenceKernel, needs_torch
from polyhead.native.arguments import DTYPES
from polyhead.native.tensor_check import unsupported_tensor_kind
from polyhead.semantics.recurrence_call import RecurrenceCall


class NativeKernel(RecurrenceKernel):
    name = "native"
    summary = "C++ for CPUs: token by token, a part of the state in the first cache; no gradients"

    def unavailable(self) -> str | None:
        return native.unavailable()

    def plan(self, call: RecurrenceCall) -> Refusal | None:
        if call.q.dtype not in DTYPES:
            return Refusal(str(call.q.dtype).removeprefix("torch."))
        if not call.q.is_cpu:
            return Refusal(f"tensors on {call.q.device}")
        if (refused := needs_torch(call)) is not None:
            return refused
        kind = unsupported_tensor_kind(call.tensors().values())
        return None if kind is None else Refusal(kind)

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
