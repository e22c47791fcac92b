"""torch's FlexAttention (Dong et al. 2024): mask and bias as functions that its compiler fuses.

    score_mod(score, b, h, q, k)    softcap and bias of one score
    mask_mod(b, h, q, k)            the mask expression of one pair

Both are built from the same masks and biases as everywhere, over positions, windows and lengths
that are data. Which blocks are empty, full or mixed comes from ``Mask.classify``, so no T×S mask is
ever drawn. Compiling takes seconds per kind of call (on a CPU per shape too), hence this kernel
runs only where it is named. Without its compiler FlexAttention would build the T×S matrix: where
there is none the kernel says that it is not available.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead.kernels.base import Kernel, Refusal
from polyhead.semantics import Call, Mask, State, Tokens, Visibility
from polyhead.semantics.pairs import OnePair, Value
from polyhead.semantics.scores import poisoned, quarantine
from polyhead.semantics.tokens import is_traced, is_transformed

BLOCK = 128
"""Queries and keys of a block of the block mask, as FlexAttention's own default."""


class Rules(NamedTuple):
    """The mask and the bias of a call as functions of one pair, each None where there is none."""

    mask: Value | None
    bias: Value | None


class FlexKernel(Kernel[Rules]):
    name = "flex"
    summary = (
        "torch's FlexAttention; compiles for seconds at every new kind of call, so by name only"
    )

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available() and not _has_compiler():
            return "needs a C++ compiler at run time: apt-get install g++"
        return None

    def plan(self, call: Call) -> Rules | Refusal:
        spec, on_cpu = call.spec, call.q.device.type == "cpu"
        if call.q.device.type not in ("cpu", "cuda"):
            return Refusal(f"tensors on {call.q.device.type}")
        if on_cpu and not (
            _has_compiler() and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
        ):
            return Refusal("tensors on this CPU (it needs a C++ compiler and AVX2)")
        if is_traced(call.q) or is_transformed():
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
        if call.requires_grad and (call.needs_lse or spec.deterministic):
            return Refusal(
                "a gradient through lse" if call.needs_lse else "deterministic gradients"
            )
        if (
            call.requires_grad
            and spec.bias is not None
            and any(x.requires_grad for x in spec.bias.tensors)
        ):
            return Refusal(f"a gradient of bias={spec.bias!r}")
        of = OnePair(call.q_tokens, call.source.tokens, call.q.device)
        mask = None if spec.mask is None else spec.mask.rule(of)
        if spec.mask is not None and mask is None:
            return Refusal(f"mask={spec.mask!r} (it has no function of one pair)")
        bias = None if spec.bias is None else spec.bias.rule(of)
        if spec.bias is not None and bias is None:
            return Refusal(f"bias={spec.bias!r} (it has no function of one pair)")
        return Rules(mask, bias)

    def run(self, call: Call, plan: Rules) -> State:
        k, v = call.source.gather()
        bad = None
        if call.spec.mask is not None:
            k, v, bad = quarantine(k, v)
        out, lse = _compiled(call.q, k, v, call, plan)
        if bad is not None and bool(bad.any()):
            out = out.masked_fill(_spoiled(call, bad)[..., None], torch.nan)
        return State(out, lse)


@cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


@cache
def _flex(device_type: str) -> Callable[..., Any]:
    """FlexAttention, compiled; an error instead of its uncompiled form where that cannot be."""
    from torch.nn.attention.flex_attention import flex_attention

    # With shapes left open torch 2.13 writes C++ that does not compile for some tables of keys.
    dynamic = False if device_type == "cpu" else None
    compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)
    return compiled


def _compiled(
    q: Tensor, k: Tensor, v: Tensor, call: Call, rules: Rules
) -> tuple[Tensor, Tensor | None]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    spec, blocks = call.spec, None
    if spec.mask is not None and rules.mask is not None:
        blocks = BlockMask.from_kv_blocks(
            *_blocks(spec.mask, call.q_tokens, call.source.tokens, q.device),
            BLOCK_SIZE=BLOCK,
            mask_mod=_mask_mod(rules.mask),
            seq_lengths=(call.q_tokens.length, call.source.tokens.length),
        )
    # Every kind of mask is a function of its own: they are no storm of recompilations.
    with config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
        out, more = _flex(q.device.type)(
            q, k, v, _score_mod(spec.softcap, rules.bias), blocks, spec.scale, call.groups > 1,
            return_aux=AuxRequest(lse=call.needs_lse),
        )  # fmt: skip
    return out, more.lse


def _mask_mod(rule: Value) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen: Tensor = rule((b, h, q, k))
        return seen

    return mask_mod


def _score_mod(cap: float | None, bias: Value | None) -> Callable[..., Tensor] | None:
    """Softcap and bias of one score, or None where there is neither."""
    if cap is None and bias is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = torch.tanh(score / cap) * cap
        return score if bias is None else score + bias((b, h, q, k))

    return score_mod


def _blocks(
    mask: Mask, q: Tokens, k: Tokens, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many and which key blocks every query block sees in part, and how many and which whole.

    Counts are ``[1, 1, blocks of q]``, indices ``[1, 1, blocks of q, blocks of k]``.
    """
    kinds = [[mask.classify(row, tile) for tile in k.split(BLOCK)] for row in q.split(BLOCK)]

    def of(kind: Visibility) -> tuple[Tensor, Tensor]:
        has = torch.tensor([[one is kind for one in row] for row in kinds])[None, None]
        first = has.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return has.sum(dim=-1).to(device, torch.int32), first.to(device, torch.int32)

    return *of(Visibility.SOME), *of(Visibility.ALL)


def _spoiled(call: Call, bad: Tensor) -> Tensor:
    """``[B, H, T]`` True for queries that see a key with content that is not finite."""
    mask, H = call.spec.mask, call.q.shape[1]
    B, _, T, _ = call.q.shape
    spoiled = torch.zeros(B, H, T, dtype=torch.bool, device=call.q.device)
    for rows in call.q_tokens.split(BLOCK):
        for tile in call.source.tokens.split(BLOCK):
            part = bad[..., tile.start : tile.start + tile.length]
            if mask is not None and bool(part.any()):
                seen = poisoned(mask.visible(rows, tile, call.q.device), part, H)
                spoiled[:, :, rows.start : rows.start + rows.length] |= seen
    return spoiled
