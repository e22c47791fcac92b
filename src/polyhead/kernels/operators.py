"""Compiled code as operators of torch: differentiable, and known to compile and export.

One segment of keys and values; a mask is its bounds, so all arguments are tensors and numbers.
Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polyhead.kernels.score_mods import dense
from polyhead.native.arguments import KVSegment, ScoreMods
from polyhead.native.dropout import Dropout
from polyhead.semantics import State

_KINDS = {1: "slopes", 2: "by_distance", 4: "bias"}
"""The kind of bias in ``ScoreMods`` by its number of dimensions."""


class Code(Protocol):
    """Compiled code: ``native.code.Code`` says what the arguments are."""

    def attend(
        self,
        q: Tensor,
        segments: Sequence[KVSegment],
        scale: float,
        mods: ScoreMods,
        *,
        lse: bool,
    ) -> tuple[Tensor, Tensor | None]: ...

    def gradients(
        self,
        q: Tensor,
        segment: KVSegment,
        scale: float,
        mods: ScoreMods,
        result: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        *,
        of_bias: bool,
    ) -> list[Tensor]: ...


class Operators(NamedTuple):
    """Attention and its gradients, as torch knows them."""

    attention: Any
    gradients: Any


def differentiable(
    known: Operators, segment: KVSegment, q: Tensor, scale: float, mods: ScoreMods
) -> State:
    """What ``Code.attend`` computes, with gradients of q, of the segment and of the bias."""
    dropout = mods.dropout
    numbers = scale, mods.softcap, 0.0 if dropout is None else dropout.p
    places = [segment.first, int(mods.batch_invariant)]
    places += [] if dropout is None else [dropout.query, dropout.key]
    tensors = [
        segment.positions, *(mods.bounds or (None, None)), mods.keep, mods.q_positions,
        None if dropout is None else dropout.seed,
    ]  # fmt: skip
    given = q, segment.k, segment.v, mods.learned
    return State(*known.attention(*given, *numbers, places, tensors))


def operators(
    name: str, code: Callable[[torch.dtype], Code], device_types: str | None = None
) -> Operators:
    """Registers a code's operators with torch.

    Args:
        name: ``polyhead::name`` will be the operator.
        code: What returns the code for a dtype when it is needed.
        device_types: Where it can compute; None: anywhere.
    """
    how: dict[str, Any] = {"mutates_args": (), "device_types": device_types}

    @torch.library.custom_op(f"polyhead::{name}", **how)
    def attention_operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float,
        dropout_p: float,
        places: Sequence[int],
        mods: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """out ``[B, H, T, V]`` and lse ``[B, H, T]``; the lists are those of ``differentiable``."""
        segment, parts = _as_given(k, v, bias, softcap, dropout_p, places, mods)
        out, lse = code(q.dtype).attend(dense(q), [segment], scale, parts, lse=True)
        assert lse is not None
        return out, lse

    @torch.library.custom_op(f"polyhead::{name}_backward", **how)
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
        mods: Sequence[Tensor | None],
        of_bias: bool,
    ) -> list[Tensor]:
        """Gradients of q, k, v and, if asked for, the bias, given out and lse and theirs."""
        segment, parts = _as_given(k, v, bias, softcap, dropout_p, places, mods)
        out, lse = result
        grad_out, grad_lse = grads
        both = dense(grad_out), grad_lse.contiguous()
        return code(q.dtype).gradients(
            dense(q), segment, scale, parts, (out, lse), both, of_bias=of_bias
        )

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, *ctx.numbers, mods = inputs
        ctx.save_for_backward(q, k, v, bias, *output, *mods)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, out, lse, *mods = ctx.saved_tensors
        of_bias = ctx.needs_input_grad[3]
        found = gradients_operator(grads, (out, lse), q, k, v, bias, *ctx.numbers, mods, of_bias)
        of_found = found if of_bias else [*found, None]
        # torch takes a list of tensors for so many inputs, and one that holds a None for a value.
        of_extras = None if any(x is None for x in mods) else [None] * len(mods)
        return (*of_found, None, None, None, None, of_extras)

    def one_by_one(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        """A batch of calls under vmap."""
        results = [
            attention_operator(*(_at(i, x, d) for x, d in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)

    attention_operator.register_fake(_fake_result)
    gradients_operator.register_fake(_fake_gradients)
    attention_operator.register_autograd(backward, setup_context=remember)
    attention_operator.register_vmap(one_by_one)
    return Operators(attention_operator, gradients_operator)


def _fake_result(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_gradients(
    grads: Any, result: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    *_, of_bias = rest
    leaves = [q, k, v] if bias is None or not of_bias else [q, k, v, bias]
    return [x.new_empty(x.shape) for x in leaves]


def _at(i: int, x: Any, dim: Any) -> Any:
    """Call i of a batch of arguments."""
    if isinstance(x, list | tuple):
        return [_at(i, part, d) for part, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


def _as_given(
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    softcap: float,
    dropout_p: float,
    places: Sequence[int],
    mods: Sequence[Tensor | None],
) -> tuple[KVSegment, ScoreMods]:
    positions, low, high, keep, q_positions, seed = mods
    first, batch_invariant, *of_dropout = places
    bounds = None if low is None or high is None else (low, high)
    learned: dict[str, Any] = {} if bias is None else {_KINDS[bias.ndim]: bias}
    segment = KVSegment(dense(k), dense(v), first, positions)
    dropout = None if seed is None else Dropout(dropout_p, seed, *of_dropout)
    parts = {"dropout": dropout, "batch_invariant": bool(batch_invariant), **learned}
    return segment, ScoreMods(softcap, bounds, keep, q_positions, **parts)
