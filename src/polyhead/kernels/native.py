"""polyhead's own C++ kernel for CPUs: csrc/attend.h and gradients.h tell how it works.

Keys and values are read where they lie, once for all query heads of a group; ``extras`` says what
else the code is handed.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from polyhead import native
from polyhead.errors import NotPlainError
from polyhead.kernels.base import Kernel, Refusal
from polyhead.kernels.extras import dense, extras_of, pieces_of
from polyhead.kernels.operators import differentiable, operators
from polyhead.native import by_row
from polyhead.native.arguments import DTYPES, Extras
from polyhead.native.code import Code
from polyhead.native.gate import is_fake, stranger
from polyhead.semantics import Call, DenseSource, State
from polyhead.semantics.tokens import is_differentiated, is_traced, is_transformed


class NativeKernel(Kernel[Extras]):
    name = "native"
    checks_storage = True
    summary = "C++ for CPUs: K and V read once per kv head, where they lie; no double derivatives"

    def unavailable(self) -> str | None:
        return native.unavailable()

    def plan(self, call: Call) -> Extras | Refusal:
        if (feature := self._refused(call)) is not None:
            return Refusal(feature)
        found = extras_of(call)
        if isinstance(found, Refusal) or not by_row.is_asked():
            return found
        return found._replace(by_row=True)

    def _refused(self, call: Call) -> str | None:
        """What refuses a call whatever its mask."""
        source, q = call.source, call.q
        if q.dtype not in DTYPES:
            return str(q.dtype).removeprefix("torch.")
        if not q.is_cpu:
            return f"tensors on {q.device}"
        compiling = torch.compiler.is_compiling()
        if is_transformed():
            return "torch.func"
        if compiling:
            if is_differentiated():
                return "torch.func"
        elif (strange := stranger(call.tensors().values())) is not None:
            return strange
        elif is_traced(q) and not is_fake((q,)):
            return "torch.func"
        if not source.in_place:
            return "keys and values that would be copied to be read"
        if by_row.is_asked() and call.requires_grad:
            return "gradients within reproducible()"
        if by_row.is_asked() and source.tokens.positions is None and source.tokens.places.low:
            return "a ring within reproducible(): its keys begin at any place; use a dense cache"
        if not (q.shape[0] and q.shape[2] and source.tokens.length):
            return "no batch rows, no queries or no keys"
        if call.spec.dropout_p:
            if call.q_tokens.stride != 1 or source.tokens.stride != 1:
                return "dropout between places with gaps"
            if call.spec.heads is not None and q.shape[0] > 1:
                return "dropout of a part of the heads in several batch rows"
        if type(source) is not DenseSource:
            if call.requires_grad:
                return "gradients beside keys and values that a cache holds"
            if is_fake((q,)):
                return "tensors of a cache without values"
            if compiling:
                return "compilation of a cache"
        return None

    def run(self, call: Call, plan: Extras) -> State:
        spec, pieces = call.spec, pieces_of(call)
        if call.requires_grad or torch.compiler.is_compiling() or is_fake(call.tensors().values()):
            (piece,) = pieces
            return differentiable(_OPERATORS, piece, call.q, spec.scale, plan)
        code = _code()
        with suppress(NotPlainError):  # gaps in a last dimension are too rare to check first
            return State(*code.attend(call.q, pieces, spec.scale, plan, lse=call.needs_lse))
        pieces = [piece._replace(k=dense(piece.k), v=dense(piece.v)) for piece in pieces]
        return State(*code.attend(dense(call.q), pieces, spec.scale, plan, lse=call.needs_lse))

    def gradients(
        self, call: Call, plan: Extras, result: State, grads: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        code, learned = _code(), plan.learned
        (piece,) = pieces_of(call)
        k, v = dense(piece.k), dense(piece.v)
        slopes, by_distance, bias = (
            None if x is None else x.detach() for x in (plan.slopes, plan.by_distance, plan.bias)
        )
        plain = plan._replace(slopes=slopes, by_distance=by_distance, bias=bias)
        of_bias = learned is not None and learned.requires_grad
        out, lse = result
        assert lse is not None
        made = code.gradients(
            dense(call.q), piece._replace(k=k, v=v), call.spec.scale, plain,
            (dense(out), lse.contiguous()), (dense(grads[0]), grads[1].contiguous()),
            of_bias=of_bias,
        )  # fmt: skip
        if learned is None or call.spec.bias is None or not of_bias:
            return made
        *found, of_learned = made
        # From a number for each head, distance or pair back to what the bias is computed from.
        tensors = call.spec.bias.tensors
        pulled = torch.autograd.grad(learned, tensors, of_learned, materialize_grads=True)
        return [*found, *pulled]


def _code() -> Code:
    code = native.code()
    if code is None:
        raise RuntimeError(native.unavailable())
    return code


_OPERATORS = operators("attention", _code, "cpu")
