"""Masks and biases as functions of one pair, as FlexAttention takes them.

    mask_mod(b, h, q, k)            whether query index q may look at key index k
    score_mod(score, b, h, q, k)    softcap, then bias

A function reads positions, windows and lengths from tensors, so that another number is another
input and not another function to compile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.semantics import (
    ALiBi,
    Bias,
    Call,
    Causal,
    Documents,
    Drop,
    Keep,
    KeyLengths,
    Mask,
    Prefix,
    RelativeBias,
    TensorBias,
    Tokens,
    Window,
)
from polyhead.semantics.masks.algebra import And, Not, Or

Pair = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of the whole-number scalars (batch row, head, query index, key index)."""

_MASKS = (Causal, Window, Prefix, KeyLengths, Documents, Keep, Drop, And, Or, Not)
_BIASES = (ALiBi, RelativeBias, TensorBias)


def knows_mask(mask: Mask | None) -> bool:
    """Whether there is a function for every part of a mask expression."""
    return mask is None or (type(mask) in _MASKS and all(map(knows_mask, mask.parts())))


def knows_bias(bias: Bias | None) -> bool:
    """Whether there is a function for a bias."""
    return bias is None or type(bias) in _BIASES


def mask_function(mask: Mask, call: Call) -> Pair:
    """A mask expression as a function of one pair."""
    device = call.q.device
    q_at, k_at = _positions(call.q_tokens, device), _positions(call.source.tokens, device)
    if isinstance(mask, And | Or):
        left, right = mask_function(mask.left, call), mask_function(mask.right, call)
        if isinstance(mask, And):
            return lambda b, h, q, k: left(b, h, q, k) & right(b, h, q, k)
        return lambda b, h, q, k: left(b, h, q, k) | right(b, h, q, k)
    if isinstance(mask, Not):
        inner = mask_function(mask.inner, call)
        return lambda b, h, q, k: ~inner(b, h, q, k)
    if isinstance(mask, Causal):
        return lambda b, h, q, k: q_at(b, q) >= k_at(b, k)
    if isinstance(mask, Window):
        size = torch.tensor(mask.size, device=device)
        if mask.ahead is None:
            return lambda b, h, q, k: q_at(b, q) - k_at(b, k) < size
        ahead = torch.tensor(mask.ahead, device=device)
        return lambda b, h, q, k: (
            (q_at(b, q) - k_at(b, k) < size) & (k_at(b, k) - q_at(b, q) <= ahead)
        )
    if isinstance(mask, Prefix):
        length = mask.length.tensor(device).reshape(-1)
        return lambda b, h, q, k: k_at(b, k) < _at(length, b)
    if isinstance(mask, KeyLengths):
        length, first = mask.length.tensor(device).reshape(-1), call.source.tokens.places.low
        return lambda b, h, q, k: k + first < _at(length, b)
    if isinstance(mask, Documents):
        q_ids, k_ids = (mask.ids(t, device) for t in (call.q_tokens, call.source.tokens))
        return lambda b, h, q, k: _at(q_ids, b, q) == _at(k_ids, b, k)
    if isinstance(mask, Keep):
        allowed = ~mask.allowed if isinstance(mask, Drop) else mask.allowed
        allowed = allowed.to(device)
        return lambda b, h, q, k: _at(allowed, b, h, q, k)
    raise TypeError(f"no function for {mask!r}")


def score_function(call: Call) -> Callable[..., Tensor] | None:
    """Softcap and bias as a function of one score, or None where there is neither."""
    cap, bias = call.spec.softcap, call.spec.bias
    if cap is None and bias is None:
        return None
    added = None if bias is None else _bias_of(bias, call)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = torch.tanh(score / cap) * cap
        return score if added is None else score + added(b, h, q, k)

    return score_mod


def _bias_of(bias: Bias, call: Call) -> Pair:
    """What a bias adds to one score."""
    device = call.q.device
    q_at, k_at = _positions(call.q_tokens, device), _positions(call.source.tokens, device)
    if isinstance(bias, ALiBi):
        slopes = bias.slopes.float()
        return lambda b, h, q, k: -_at(slopes, h) * (q_at(b, q) - k_at(b, k)).abs()
    if isinstance(bias, RelativeBias):
        far, table = bias.max_distance, bias.by_distance(torch.empty(0, device=device))
        return lambda b, h, q, k: _at(table, h, (k_at(b, k) - q_at(b, q)).clamp(-far, far) + far)
    tensor = bias.tensor
    return lambda b, h, q, k: _at(tensor, b, h, q, k)


def _at(table: Tensor, *index: Tensor) -> Tensor:
    """An element of a table whose sides of length 1 stand for every index."""
    sides = zip(index, table.shape, strict=True)
    return table[tuple(i if side > 1 else torch.zeros_like(i) for i, side in sides)]


def _positions(tokens: Tokens, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The position of a token by batch row and index."""
    if tokens.positions is None:
        first = torch.tensor(tokens.places.low, device=device)
        return lambda b, i: i + first
    table = tokens.position_tensor(device).reshape(-1, tokens.length)
    return lambda b, i: _at(table, b, i)
