"""torch's FlexAttention (Dong et al. 2024): mask and bias as functions that its compiler fuses.

    score_mod(score, b, h, q, k)    softcap and bias of one score
    mask_mod(b, h, q, k)            the mask expression of one pair

Both are the rules of the same masks and biases as everywhere, over positions, windows and lengths
that are data. No T×S mask is ever drawn: ``flex_blocks`` says which blocks are empty, full or
mixed. Compiling takes seconds per kind of call, and on a CPU per shape too, hence ``auto`` takes
this kernel on CUDA alone, for what is listed here. Without its compiler FlexAttention would build
the T×S matrix: where there is none the kernel says that it is not available.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from polyhead.kernels import flex_blocks
from polyhead.kernels.base import Kernel, Refusal
from polyhead.semantics import (
    ALiBi,
    Call,
    Causal,
    Chunk,
    Documents,
    KeyLengths,
    Prefix,
    RelativeBias,
    State,
    Window,
)
from polyhead.semantics.masks import And, Not, Or
from polyhead.semantics.pairs import PairExpr, ScalarPair
from polyhead.semantics.scores import sees_nonfinite, zero_nonfinite
from polyhead.semantics.tokens import is_traced, is_transformed

_MASKS = frozenset({And, Or, Not, Causal, Window, Chunk, Prefix, KeyLengths, Documents, type(None)})
_BIASES = frozenset({ALiBi, RelativeBias, type(None)})
_HEAD_SIZES = frozenset({16, 32, 64, 128, 256})
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What ``auto`` may give to FlexAttention on CUDA: exact classes, sizes and dtypes."""


class FlexKernel(Kernel[None]):
    name = "flex"
    summary = "torch's FlexAttention; compiles for seconds at every new kind of call"
    needs_contiguous_kv = True

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available() and not _compiles_for_cpu():
            return "needs a GPU, or AVX-512 and a C++ compiler at run time (apt-get install g++)"
        return None

    def auto_skip_reason(self, call: Call) -> str | None:
        q, spec, source = call.q, call.spec, call.source
        if q.device.type != "cuda":
            return "it compiles for seconds"
        if torch.compiler.is_compiling():
            return "the call is being compiled already"
        parts = [None] if spec.mask is None else [*spec.mask.walk()]
        listed = (
            {type(part) for part in parts} <= _MASKS
            and type(spec.bias) in _BIASES
            and {source.key_dim, source.value_dim} <= _HEAD_SIZES
            and q.dtype in _DTYPES
            and call.groups.bit_count() == 1
        )
        if not listed:
            return "not among what is known to be right on a GPU"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "it waits for the device, which a captured graph must not"
        if source.tokens.length < flex_blocks.BLOCK:
            return f"fewer than {flex_blocks.BLOCK} keys are not worth compiling for"
        return None

    def plan(self, call: Call) -> Refusal | None:
        spec, on_cpu = call.spec, call.q.device.type == "cpu"
        if call.q.device.type not in ("cpu", "cuda"):
            return Refusal(f"tensors on {call.q.device.type}")
        if on_cpu and not _compiles_for_cpu():
            return Refusal("tensors on this CPU (it needs a C++ compiler and AVX-512)")
        if call.q.device.type == "cuda" and not _has_triton():
            return Refusal("tensors on CUDA (it needs Triton: pip install triton)")
        if is_transformed() or (is_traced(call.q) and type(call.q) is not FakeTensor):
            return Refusal("a call that is being compiled, exported or transformed by torch.func")
        if call.q.dtype == torch.float64:
            return Refusal("float64")
        if not (call.q_tokens.length and call.source.tokens.length):
            return Refusal("no queries or no keys")
        if spec.dropout_p:
            return Refusal(f"dropout_p={spec.dropout_p}")
        if call.needs_lse and on_cpu:
            return Refusal("return_lse on the CPU")
        if call.requires_grad and on_cpu:
            return Refusal("a gradient on the CPU")
        if call.requires_grad and spec.deterministic:
            return Refusal("deterministic gradients")
        if (
            call.requires_grad
            and spec.bias is not None
            and any(x.requires_grad for x in spec.bias.tensors)
        ):
            return Refusal(f"a gradient of bias={spec.bias!r}")
        if spec.mask is not None and not spec.mask.has_rule():
            return Refusal(f"mask={spec.mask!r} (it is no function of one pair)")
        if spec.bias is not None and not spec.bias.uses_rule:
            return Refusal(f"bias={spec.bias!r} (it is no function of one pair)")
        return None

    def run(self, call: Call, plan: None) -> State:
        k, v = call.source.gather()
        if type(call.q) is FakeTensor:  # a result of the same shapes, with gradients
            all_of_it, zeros = call.q.sum() + k.sum() + v.sum(), call.q.new_zeros
            rows = call.q.shape[:3]
            return State(zeros(*rows, v.shape[-1]) + all_of_it, zeros(rows).float() + all_of_it)
        bad = None
        if call.spec.mask is not None:
            k, v, bad = zero_nonfinite(k, v)
        out, lse = _compiled(call.q, k, v, call)
        if bad is not None and bool(bad.any()):
            out = out.masked_fill(_spoiled(call, bad)[..., None], torch.nan)
        return State(out, lse)


@cache
def _compiles_for_cpu() -> bool:
    # For AVX2 alone torch 2.13 compiles code that is wrong for some sizes: 24 keys of 16 features.
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _flex(device_type: str, structure: Hashable) -> Callable[..., Any]:
    """FlexAttention, compiled for calls of one structure, lengths left open where that works.

    An error instead of its uncompiled form where it cannot be compiled.
    """

    def attend(*arguments: Any, **options: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(*arguments, **options)

    # torch keeps what it compiled by code object: structures do not look through each other's.
    attend.__code__ = attend.__code__.replace()
    return torch.compile(attend, **_options(device_type))


def _options(device_type: str) -> dict[str, Any]:
    # With shapes left open torch 2.13 writes C++ that does not compile for some tables of keys.
    return {"fullgraph": True, "dynamic": False if device_type == "cpu" else None}


def _structure(call: Call) -> Hashable:
    """The key of a compiled function: everything in a call that is not a number or a tensor."""
    spec = call.spec
    return (
        tuple(type(part) for part in spec.mask.walk()) if spec.mask is not None else None,
        type(spec.bias), spec.softcap, call.needs_lse, call.requires_grad, call.q.dtype,
    )  # fmt: skip


def _compiled(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    spec, blocks = call.spec, None
    of = ScalarPair(call.q_tokens, call.source.tokens, q.device)
    bias = None if spec.bias is None else spec.bias.rule(of)
    if spec.mask is not None:
        blocks = BlockMask.from_kv_blocks(
            *flex_blocks.blocks_of(spec.mask, call.q_tokens, call.source.tokens, q.device),
            BLOCK_SIZE=flex_blocks.BLOCK,
            mask_mod=_mask_mod(spec.mask.rule(of)),
            seq_lengths=(call.q_tokens.length, call.source.tokens.length),
        )
    # Shapes that cannot be dynamic are compiled one by one, so many recompilations are expected.
    with config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
        out, more = _flex(q.device.type, _structure(call))(
            q, k, v, _score_mod(spec.softcap, bias), blocks, spec.scale, call.groups > 1,
            return_aux=AuxRequest(lse=call.needs_lse),
        )  # fmt: skip
    return out, more.lse


def _mask_mod(rule: PairExpr) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen: Tensor = rule((b, h, q, k))
        return seen

    return mask_mod


def _score_mod(cap: float | None, bias: PairExpr | None) -> Callable[..., Tensor] | None:
    """Softcap and bias of one score, or None where there is neither."""
    if cap is None and bias is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = torch.tanh(score / cap) * cap
        return score if bias is None else score + bias((b, h, q, k))

    return score_mod


def _spoiled(call: Call, bad: Tensor) -> Tensor:
    """``[B, H, T]`` True for queries that see a key with content that is not finite."""
    mask, H = call.spec.mask, call.q.shape[1]
    B, _, T, _ = call.q.shape
    nonfinite = torch.zeros(B, H, T, dtype=torch.bool, device=call.q.device)
    for rows in call.q_tokens.split(flex_blocks.BLOCK):
        for tile in call.source.tokens.split(flex_blocks.BLOCK):
            part = bad[..., tile.start : tile.start + tile.length]
            if mask is not None and bool(part.any()):
                seen = sees_nonfinite(mask.visible(rows, tile, call.q.device), part, H)
                nonfinite[:, :, rows.start : rows.start + rows.length] |= seen
    return nonfinite
