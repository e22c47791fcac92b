"""The kernel of the registry: which calls Triton may compute, and where ``auto`` takes it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from polyhead.kernels.base import Kernel, Refusal, SwitchedOffError
from polyhead.kernels.operators import Code, differentiable, operators
from polyhead.kernels.score_mods import dense, pieces_of, score_mods_of
from polyhead.kernels.triton import blocks, self_test
from polyhead.kernels.triton.interpreting import interpreting
from polyhead.native.arguments import ScoreMods
from polyhead.native.tensor_check import is_exported_to_onnx, is_fake
from polyhead.semantics import Call, DenseSource, KeyValueSource, State
from polyhead.semantics.scores import is_distributed
from polyhead.semantics.tokens import is_differentiated, is_traced, is_transformed

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_MOST_PIECES = 16
_DRAWN = 64 << 20
"""Most bytes of a T×S tensor that is drawn for a mask or a bias which has no other form."""


class TritonKernel(Kernel[ScoreMods]):
    name = "triton"
    summary = "our own kernels for GPUs: K and V read once per kv head, where they lie"

    def unavailable(self) -> str | None:
        if not _has_triton():
            return "needs Triton: pip install 'polyhead[gpu]'"
        if not (_has_gpu() or interpreting()):
            return "no CUDA device here (TRITON_INTERPRET=1 interprets it on a CPU, slowly)"
        return None

    def auto_skip_reason(self, call: Call) -> str | None:
        q, source = call.q, call.source
        if q.device.type != "cuda":
            return "on a CPU it is interpreted"
        if self.unavailable() is not None or q.dtype not in _DTYPES:
            return None  # ``unavailable`` says it
        return unsupported_reason(
            q.device, q.dtype, source.key_dim, source.value_dim, _bits(source)
        )

    def plan(self, call: Call) -> ScoreMods | Refusal:
        if (feature := _refused(call)) is not None:
            return Refusal(feature)
        plan = score_mods_of(call, drawn=_DRAWN)
        if isinstance(plan, Refusal) or not call.requires_grad:
            return plan
        largest = max(call.source.key_dim, call.source.value_dim)
        if largest > blocks.LARGEST_LEARNT:
            return Refusal(f"gradients of a head size of {largest}")
        learned = plan.learned
        if call.spec.deterministic and learned is not None and learned.requires_grad:
            return Refusal("deterministic gradients of a bias (they are added in any order)")
        return plan

    def run(self, call: Call, plan: ScoreMods) -> State:
        try:
            return _computed(call, plan)
        except Exception as error:
            if not self_test.is_of_compiler(error):
                raise
            q, source = call.q, call.source
            parts = blocks.parts_of(source.key_dim, source.value_dim)
            self_test.switch_off(q.device, q.dtype, parts, _bits(source), str(error))
            raise SwitchedOffError(f"kernel 'triton' does not compile here: {error}") from error


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    bits: self_test.Bits | None = None,
) -> str | None:
    """Why ``auto`` does not take the kernels for such heads on a CUDA device, or None.

    Args:
        device: Device of the call.
        dtype: Dtype of q, k and v.
        key_dim: Key size D of a head.
        value_dim: Value size V of a head.
        bits: Bits of a key's and of a value's code.
    """
    parts = blocks.parts_of(key_dim, value_dim)
    if not blocks.fits(parts, dtype.itemsize, coded=bits is not None):
        return "such heads are not known to fit the registers in this dtype"
    return self_test.unsupported_reason(device, dtype, parts, bits)


def _refused(call: Call) -> str | None:
    """What refuses a call whatever its mask."""
    source, q = call.source, call.q
    if q.dtype not in _DTYPES:
        return str(q.dtype).removeprefix("torch.")
    if q.device.type != "cuda" and not (q.is_cpu and interpreting()):
        return f"tensors on {q.device}"
    compiling = torch.compiler.is_compiling()
    if torch.compiler.is_exporting() and is_exported_to_onnx():
        return "torch.onnx.export"
    if is_transformed() or (compiling and is_differentiated()):
        return "torch.func"
    if not compiling:
        if torch._C._is_tracing():
            return "torch.jit.trace"
        if is_distributed(*call.tensors().values()):
            return "DTensors"
        if is_traced(q) and not is_fake((q,)):
            return "torch.func"
    if max(source.key_dim // 2, source.value_dim - 1) >= blocks.LARGEST:
        return f"a head size of {max(source.key_dim, source.value_dim)}"
    if not (q.shape[0] and q.shape[2] and source.tokens.length):
        return "no batch rows, no queries or no keys"
    if call.spec.dropout_p:
        if call.q_tokens.stride != 1 or source.tokens.stride != 1:
            return "dropout between places with gaps"
        if call.spec.heads is not None and q.shape[0] > 1:
            return "dropout of a part of the heads in several batch rows"
    if type(source) is DenseSource:
        return None
    if not source.in_place:
        return "keys and values that would be copied to be read"
    if call.requires_grad:
        return "gradients beside keys and values that a cache holds"
    if compiling or is_fake((q,)):
        return "a graph that holds a cache"
    return "keys in too many pieces" if len(source.segments()) > _MOST_PIECES else None


def _bits(source: KeyValueSource) -> self_test.Bits | None:
    """Bits of keys and values in codes; None if they are numbers."""
    if type(source) is DenseSource or not source.in_place:
        return None
    codings = (strip.coding for strip in source.segments())
    return next(((each.k_bits, each.v_bits) for each in codings if each is not None), None)


def _computed(call: Call, plan: ScoreMods) -> State:
    spec, pieces = call.spec, pieces_of(call)
    if call.requires_grad or torch.compiler.is_compiling() or is_fake(call.tensors().values()):
        (piece,) = pieces
        return differentiable(_OPERATORS, piece, call.q, spec.scale, plan)
    pieces = [piece._replace(k=dense(piece.k), v=dense(piece.v)) for piece in pieces]
    return State(
        *_code(call.q.dtype).attend(dense(call.q), pieces, spec.scale, plan, lse=call.needs_lse)
    )


@cache
def _found() -> bool:
    return find_spec("triton") is not None


def _has_triton() -> bool:
    return _found()


# What torch.compiler.assume_constant_result would write: the compiler does not look into caches.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _code(dtype: torch.dtype) -> Code:
    from polyhead.kernels.triton import launch  # imports Triton

    return launch


_OPERATORS = operators("triton_attention", _code)
