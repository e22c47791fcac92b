"""polyhead's own C++ kernel for CPUs: csrc/attend.h and gradients.h tell how it works.

Keys and values are read where they lie, in one piece or in the few of a ring, once for all query
heads of a group. A mask becomes, for every query, the range of key positions that it may see, which
costs O(T) memory; an explicit tensor is read as it is. A relative bias becomes a number for every
distance and head.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from polyhead import native
from polyhead.errors import NotPlainError
from polyhead.kernels.base import Kernel, Refusal
from polyhead.kernels.native_operator import dense, differentiable
from polyhead.native.arguments import DTYPES, NO_EXTRAS, Extras, Piece
from polyhead.native.gate import is_fake, stranger
from polyhead.semantics import Call, DenseSource, Specification, State
from polyhead.semantics.biases import Numbers
from polyhead.semantics.masks import Range
from polyhead.semantics.scores import dropout_of
from polyhead.semantics.storage import check_storage
from polyhead.semantics.tokens import is_differentiated, is_traced, is_transformed

_NOWHERE = torch.iinfo(torch.int64)
"""The range of positions; a bound at either end hides nothing but the very last one."""


class NativeKernel(Kernel[Extras]):
    name = "native"
    checks_storage = True
    summary = "C++ for CPUs: K and V read once per kv head, where they lie; no double derivatives"

    def unavailable(self) -> str | None:
        return native.unavailable()

    def plan(self, call: Call) -> Extras | Refusal:
        if (feature := self._refused(call)) is not None:
            return Refusal(feature)
        return _extras(call) if _has_extras(call.spec) else NO_EXTRAS

    def _refused(self, call: Call) -> str | None:
        """What needs no look at the mask to be known."""
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
        spec, pieces = call.spec, _pieces(call)
        if call.requires_grad or torch.compiler.is_compiling() or is_fake(call.tensors().values()):
            (piece,) = pieces
            return differentiable(piece, call.q, spec.scale, plan)
        code = native.code()
        if code is None:
            raise RuntimeError(native.unavailable())
        with suppress(NotPlainError):  # gaps in a last dimension: too rare to be looked for first
            return State(*code.attend(call.q, pieces, spec.scale, plan, lse=call.needs_lse))
        pieces = [piece._replace(k=dense(piece.k), v=dense(piece.v)) for piece in pieces]
        return State(*code.attend(dense(call.q), pieces, spec.scale, plan, lse=call.needs_lse))


def _has_extras(spec: Specification) -> bool:
    return bool(
        spec.mask is not None or spec.bias is not None or spec.softcap is not None or spec.dropout_p
    )


def _pieces(call: Call) -> list[Piece]:
    found = []
    for tokens, k, v, table, coding in call.source.strips():
        positions = None
        if tokens.positions is not None or tokens.stride != 1:
            positions = dense(tokens.position_tensor(k.device).long()).contiguous()
        pages, skipped, paged = table or (None, 0, 0)
        first = tokens.places.low
        found.append(Piece(k, v, first, positions, pages, skipped, paged, coding))
    return found


def _extras(call: Call) -> Extras | Refusal:
    spec, q = call.spec, call.q
    bounds = keep = positions = None
    numbers = Numbers()
    if spec.mask is not None:
        found = spec.mask.range(call.q_tokens, call.source.tokens, q.device)
        if found is None:
            return Refusal(f"mask={spec.mask!r} (it would need a T×S tensor)")
        bounds = _bounds(found, q.shape[2])
        if found.keep is not None:
            keep = found.keep.expand(*found.keep.shape[:2], q.shape[2], call.source.tokens.length)
            keep = keep if keep.stride(-1) == 1 else keep.contiguous()
    if spec.bias is not None:
        if not torch.compiler.is_compiling():
            for x in spec.bias.tensors:
                check_storage("bias", x)  # it may be copied below
        found_numbers = spec.bias.numbers()
        if found_numbers is None:
            return Refusal(f"bias={spec.bias!r} (it would need a T×S tensor)")
        numbers = found_numbers
        if numbers.tensor is None:
            positions = dense(call.q_tokens.position_tensor(q.device).long())
    slopes, by_distance = (None if x is None else dense(x) for x in numbers[:2])
    dropout = dropout_of(spec, call.q_tokens, call.source.tokens) if spec.dropout_p else None
    bias = positions, slopes, by_distance, numbers.tensor
    return Extras(spec.softcap or 0.0, bounds, keep, *bias, dropout)


def _bounds(found: Range, queries: int) -> tuple[Tensor, Tensor]:
    """``[1 or B, T]`` low and high of the positions that each query sees."""
    low, high = found.low, found.high
    low = torch.full((1, queries), _NOWHERE.min) if low is None else low
    high = torch.full((1, queries), _NOWHERE.max) if high is None else high
    rows = max(len(low), len(high))
    return _rows(low, rows), _rows(high, rows)


def _rows(bound: Tensor, rows: int) -> Tensor:
    return bound.expand(rows, -1).long().resolve_neg().contiguous()
