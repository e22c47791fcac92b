"""The native code as an operator of torch: differentiable, and known to compile and export.

One piece of keys and values; a mask is its bounds, so that nothing but tensors and numbers goes in.
Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead import native
from polyhead.native.code import Code, Extras, Piece


@torch.library.custom_op("polyhead::attention", mutates_args=(), device_types="cpu")
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    first: int,
    positions: Tensor | None,
    low: Tensor | None,
    high: Tensor | None,
    keep: Tensor | None,
    slopes: Tensor | None,
    q_positions: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out ``[B, H, T, V]`` and lse ``[B, H, T]``; the arguments are those of ``Code.attend``."""
    extras = _extras(softcap, low, high, keep, slopes, q_positions, bias)
    piece = Piece(_dense(k), _dense(v), first, positions)
    out, lse = _code().attend(_dense(q), [piece], scale, extras, lse=True)
    assert lse is not None
    return out, lse


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("polyhead::attention_backward", mutates_args=(), device_types="cpu")
def gradients_operator(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    first: int,
    positions: Tensor | None,
    low: Tensor | None,
    high: Tensor | None,
    keep: Tensor | None,
    slopes: Tensor | None,
    q_positions: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    extras = _extras(softcap, low, high, keep, slopes, q_positions, bias)
    piece = Piece(_dense(k), _dense(v), first, positions)
    grads = _dense(grad_out), grad_lse.contiguous()
    return _code().gradients(_dense(q), piece, scale, extras, (out, lse), grads)


@gradients_operator.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.softcap, ctx.first, *extras = inputs
    ctx.save_for_backward(q, k, v, *output, *extras)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *extras = ctx.saved_tensors
    found = gradients_operator(
        grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.softcap, ctx.first, *extras
    )
    return (*found, *([None] * 10))


def _one_by_one(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """A batch of calls under vmap."""
    results = [
        attention_operator(
            *(x if d is None else x.select(d, i) for x, d in zip(arguments, in_dims, strict=True))
        )
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)


attention_operator.register_autograd(_backward, setup_context=_remember)
attention_operator.register_vmap(_one_by_one)


def _extras(
    softcap: float,
    low: Tensor | None,
    high: Tensor | None,
    keep: Tensor | None,
    slopes: Tensor | None,
    q_positions: Tensor | None,
    bias: Tensor | None,
) -> Extras:
    return Extras(
        softcap,
        None if low is None or high is None else (low, high),
        keep,
        None if slopes is None or q_positions is None else (slopes, q_positions),
        bias,
    )


def _dense(x: Tensor) -> Tensor:
    """x, its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _code() -> Code:
    code = native.code()
    if code is None:
        raise RuntimeError(native.unavailable())
    return code
