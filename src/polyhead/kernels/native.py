"""polyhead's own C++ kernel for CPUs: csrc/attention/attend.h and gradients.h tell how it works.

Keys and values are read where they lie, once for all query heads of a group; ``mods`` says what
else the code is handed.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhead import native
from polyhead.errors import NotPlainError, UnsupportedError
from polyhead.kernels.base import Kernel, Refusal
from polyhead.kernels.operators import differentiable, operators
from polyhead.kernels.score_mods import dense, pieces_of, score_mods_of
from polyhead.native import batch_invariant
from polyhead.native.arguments import DTYPES, NO_SCORE_MODS, KVSegment, ScoreMods
from polyhead.native.code import Code
from polyhead.native.tensor_check import is_exported_to_onnx, is_fake, unsupported_tensor_kind
from polyhead.semantics import Call, DenseSource, KeyValueSource, State
from polyhead.semantics.call import simplify_mask
from polyhead.semantics.tokens import Tokens, is_differentiated, is_traced, is_transformed


class NativeKernel(Kernel[ScoreMods]):
    name = "native"
    checks_storage = True
    summary = "C++ for CPUs: K and V read once per kv head, where they lie; no double derivatives"

    def unavailable(self) -> str | None:
        return native.unavailable()

    def plan(self, call: Call) -> ScoreMods | Refusal:
        if (feature := self._refused(call)) is not None:
            return Refusal(feature)
        if batch_invariant.is_enabled() and _is_empty(call):
            return NO_SCORE_MODS._replace(batch_invariant=True)
        plainly = not (call.requires_grad or torch.compiler.is_compiling() or _is_fake(call))
        found = score_mods_of(call, inference=plainly)
        if isinstance(found, Refusal) or not batch_invariant.is_enabled():
            return found
        turned = call.source.of_row is not None or call.source.tokens.places.low
        by_index = found.keep, found.bias, found.chosen
        if turned and any(x is not None for x in by_index):
            return Refusal("an explicit mask or bias over the keys of a ring")
        return found._replace(batch_invariant=True)

    def _refused(self, call: Call) -> str | None:
        """What refuses a call whatever its mask."""
        source, q = call.source, call.q
        if q.dtype not in DTYPES:
            return str(q.dtype).removeprefix("torch.")
        if not q.is_cpu:
            return f"tensors on {q.device}"
        compiling = torch.compiler.is_compiling()
        if not compiling and torch._C._is_tracing():
            return "torch.jit.trace"
        if torch.compiler.is_exporting() and is_exported_to_onnx():
            return "torch.onnx.export"
        if is_transformed():
            return "torch.func"
        if compiling:
            if is_differentiated():
                return "torch.func"
        elif (strange := unsupported_tensor_kind(call.tensors().values())) is not None:
            return strange
        elif is_traced(q) and not is_fake((q,)):
            return "torch.func"
        if not source.in_place:
            return "keys and values that would be copied to be read"
        if batch_invariant.is_enabled() and _is_coded_ring(source):
            return "a quantized ring within batch_invariant(): its codes begin at any place"
        if _is_empty(call) and not batch_invariant.is_enabled():
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

    def run(self, call: Call, plan: ScoreMods) -> State:
        if plan.batch_invariant and _is_empty(call):
            return _of_nothing(call)
        if plan.batch_invariant and call.source.of_row is not None:
            return self._row_after_row(call)
        spec, pieces = call.spec, pieces_of(call)
        if call.requires_grad or torch.compiler.is_compiling() or _is_fake(call):
            (piece,) = pieces
            return differentiable(_OPERATORS, piece, call.q, spec.scale, plan)
        code = _code(call.q.dtype)
        with suppress(NotPlainError):  # gaps in a last dimension are too rare to check first
            return State(*code.attend(call.q, pieces, spec.scale, plan, lse=call.needs_lse))
        pieces = [piece._replace(k=dense(piece.k), v=dense(piece.v)) for piece in pieces]
        return State(*code.attend(dense(call.q), pieces, spec.scale, plan, lse=call.needs_lse))

    def _row_after_row(self, call: Call) -> State:
        """The rows of a ring that differ in length, each with its keys in the order of place."""
        of_row, (out, lse) = call.source.of_row, _of_nothing(call)
        assert of_row is not None
        for b in range(len(out)):
            source, mask, tokens = of_row(b), call.spec.mask, call.q_tokens
            if tokens.positions is not None and tokens.positions.ndim == 2 and len(out) > 1:
                tokens = Tokens.of(tokens.length, positions=tokens.positions[b : b + 1])
            if mask is not None:
                mask, _ = simplify_mask(mask.of_rows([b]), tokens, source.tokens)
            spec = replace(call.spec, mask=mask)
            row = replace(call, q=call.q[b : b + 1], source=source, spec=spec, q_tokens=tokens)
            plan = self.plan(row)
            if isinstance(plan, Refusal):
                raise UnsupportedError(f"batch_invariant() cannot keep the bits of {plan.feature}")
            found = self.run(row, plan)
            out[b] = found.out[0]
            if lse is not None and found.lse is not None:
                lse[b] = found.lse[0]
        return State(out, lse)

    def gradients(
        self, call: Call, plan: ScoreMods, result: State, grads: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        code, learned = _code(call.q.dtype), plan.learned
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


def _is_fake(call: Call) -> bool:
    return is_fake(call.tensors().values())


def _is_empty(call: Call) -> bool:
    B, _, T, _ = call.q.shape
    return not (B and T and call.source.tokens.length)


def one_query(q: Any, k: Any, v: Any, scale: float | None) -> Tensor | None:
    """One query for each head that sees every key: the call of a decoding loop, with few checks.

    Args:
        q: ``[B, H, 1, D]``.
        k: ``[B, G, S, D]``.
        v: ``[B, G, S, V]``.
        scale: Factor of the scores; default 1/√D.

    Returns:
        What ``run`` would, or None for all that is not known to be right here.
    """
    if type(k) is not Tensor or type(v) is not Tensor or (code := native.code_for(q)) is None:
        return None
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not k.dtype is v.dtype is q.dtype:
        return None
    (B, H, T, D), (b, G, S, d) = q.shape, k.shape
    if T != 1 or (b, d) != (B, D) or v.shape[:3] != (B, G, S) or not (B and G and S and D):
        return None
    if H % G or batch_invariant.is_enabled() or torch.are_deterministic_algorithms_enabled():
        return None
    if scale is None:
        scale = 1.0 / math.sqrt(D)
    elif type(scale) is not float or not math.isfinite(scale):
        return None
    with suppress(NotPlainError, ValueError):  # for the way with all checks to explain
        return code.attend(q, [KVSegment(k, v)], scale)[0]
    return None


def _of_nothing(call: Call) -> State:
    """The result of queries that see no key."""
    shape = call.q.shape[:3]
    lse = (
        torch.full(shape, -torch.inf, dtype=torch.float32, device="cpu") if call.needs_lse else None
    )
    return State(call.q.new_zeros(*shape, call.source.value_dim), lse)


def _is_coded_ring(source: KeyValueSource) -> bool:
    turned = source.of_row is not None or source.tokens.places.low
    return bool(turned) and any(strip.coding is not None for strip in source.segments())


def _code(dtype: torch.dtype) -> Code:
    code = native.code(dtype)
    if code is None:
        raise RuntimeError(native.unavailable())
    return code


_OPERATORS = operators("attention", _code, "cpu")
