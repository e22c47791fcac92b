"""Operations on single numbers, and those that are torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError

Way = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""How an operator of torch is computed: takes it and its arguments."""
_PIECE = 16_384
"""Numbers that torch computes in one thread."""
_VECTORS = 128
"""A multiple of the numbers that a step of torch's loops takes, for every dtype."""


def as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def only_whole_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole numbers are added up exactly in any order; all else is not known to keep its bits."""
    given = torch.utils._pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, Tensor) and x.is_floating_point() for x in given):
        raise UnsupportedError(
            f"batch_invariant() cannot keep the bits of {func}: the order in which it adds depends "
            "on more than the row; compute it outside the block"
        )
    return func(*args, **kwargs)


def by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of single numbers, called on whole vectors alone: each goes the same way."""
    if func._schema.is_mutable:
        plain = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"))
        kwargs = dict(kwargs)
        out = kwargs.pop("out", args[0])
        return out.copy_(_in_vectors(plain, args, kwargs))
    return _in_vectors(func, args, kwargs)


def _in_vectors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensors = [x for x in args if isinstance(x, Tensor)]
    many = [x for x in tensors if x.ndim] or tensors
    shape = torch.broadcast_tensors(*many)[0].shape  # type: ignore[no-untyped-call]
    count = math.prod(shape)
    if not count:
        empty: Tensor = func(*args, **kwargs)
        return empty
    room = -count % _VECTORS
    flat = {id(x): _padded(x.expand(shape).reshape(-1), room) for x in many}
    parts = [[flat.get(id(x), x) for x in args]]
    if count + room > _PIECE:
        parts = [
            [flat[id(x)][first : first + _PIECE] if id(x) in flat else x for x in args]
            for first in range(0, count, _PIECE)
        ]
    made = [func(*part, **kwargs) for part in parts]
    return (made[0] if len(made) == 1 else torch.cat(made))[:count].view(shape)


def _padded(x: Tensor, room: int) -> Tensor:
    return torch.cat((x, x.new_ones(room))) if room else x.contiguous()
