"""The native code as an operator of torch: differentiable, and known to compile and export.

One piece of keys and values; a mask is its bounds, so all arguments are tensors and numbers.
Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead import native
from polyhead.native.arguments import Extras, Piece
from polyhead.native.code import Code
from polyhead.native.dropout import Dropout
from polyhead.semantics import State
from polyhead.semantics.storage import check_storage

_KINDS = {1: "slopes", 2: "by_distance", 4: "bias"}
"""What a bias of so many dimensions is in ``Extras``."""


def differentiable(piece: Piece, q: Tensor, scale: float, extras: Extras) -> State:
    """What ``Code.attend`` computes, with gradients of q, of the piece and of the bias."""
    dropout = extras.dropout
    numbers = scale, extras.softcap, 0.0 if dropout is None else dropout.p
    places = [piece.first] if dropout is None else [piece.first, dropout.query, dropout.key]
    tensors = [
        piece.positions, *(extras.bounds or (None, None)), extras.keep, extras.q_positions,
        None if dropout is None else dropout.seed,
    ]  # fmt: skip
    given = q, piece.k, piece.v, extras.learned
    return State(*attention_operator(*given, *numbers, places, tensors))


@torch.library.custom_op("polyhead::attention", mutates_args=(), device_types="cpu")
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    dropout_p: float,
    places: Sequence[int],
    extras: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """out ``[B, H, T, V]`` and lse ``[B, H, T]``; the lists are those of ``differentiable``."""
    piece, parts = _as_given(k, v, bias, softcap, dropout_p, places, extras)
    out, lse = _code().attend(dense(q), [piece], scale, parts, lse=True)
    assert lse is not None
    return out, lse


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("polyhead::attention_backward", mutates_args=(), device_types="cpu")
def gradients_operator(
    grads: Sequence[Tensor],
    result: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    dropout_p: float,
    places: Sequence[int],
    extras: Sequence[Tensor | None],
    of_bias: bool,
) -> list[Tensor]:
    """Gradients of q, k, v and, if asked for, the bias, given out and lse and their gradients."""
    piece, parts = _as_given(k, v, bias, softcap, dropout_p, places, extras)
    out, lse = result
    grad_out, grad_lse = grads
    both = dense(grad_out), grad_lse.contiguous()
    return _code().gradients(dense(q), piece, scale, parts, (out, lse), both, of_bias=of_bias)


@gradients_operator.register_fake
def _(
    grads: Any, result: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    *_, of_bias = rest
    leaves = [q, k, v] if bias is None or not of_bias else [q, k, v, bias]
    return [x.new_empty(x.shape) for x in leaves]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, *ctx.numbers, extras = inputs
    ctx.save_for_backward(q, k, v, bias, *output, *extras)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, out, lse, *extras = ctx.saved_tensors
    of_bias = ctx.needs_input_grad[3]
    found = gradients_operator(grads, (out, lse), q, k, v, bias, *ctx.numbers, extras, of_bias)
    of_found = found if of_bias else [*found, None]
    # torch takes a list of tensors for so many inputs, and one that holds a None for a value.
    of_extras = None if any(x is None for x in extras) else [None] * len(extras)
    return (*of_found, None, None, None, None, of_extras)


def _one_by_one(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    """A batch of calls under vmap."""

    def at(i: int, x: Any, dim: Any) -> Any:
        if isinstance(x, list | tuple):
            return [at(i, part, d) for part, d in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, i)

    results = [
        attention_operator(*(at(i, x, d) for x, d in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)


attention_operator.register_autograd(_backward, setup_context=_remember)
attention_operator.register_vmap(_one_by_one)


def _as_given(
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    softcap: float,
    dropout_p: float,
    places: Sequence[int],
    extras: Sequence[Tensor | None],
) -> tuple[Piece, Extras]:
    positions, low, high, keep, q_positions, seed = extras
    first, *of_dropout = places
    bounds = None if low is None or high is None else (low, high)
    learned = {} if bias is None else {_KINDS[bias.ndim]: bias}
    piece = Piece(dense(k), dense(v), first, positions)
    dropout = None if seed is None else Dropout(dropout_p, seed, *of_dropout)
    return piece, Extras(softcap, bounds, keep, q_positions, dropout=dropout, **learned)


def dense(x: Tensor) -> Tensor:
    """x as native code reads it: its last dimension dense, and no negated view."""
    # Under torch.compile this cannot be known; the operator itself checks the tensors at run time.
    if x.stride(-1) == 1 and (torch.compiler.is_compiling() or not x.is_neg()):
        return x
    check_storage("a tensor that must be copied", x)  # torch would copy what was given back
    return x.resolve_neg().contiguous()


def _code() -> Code:
    code = native.code()
    if code is None:
        raise RuntimeError(native.unavailable())
    return code
