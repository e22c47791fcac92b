"""Additions of tensors, and to places that may be the same several times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.batch_invariant.elements import by_element


def added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x + alpha · y``: one rounding, unless alpha is another one."""
    if kwargs.get("alpha", 1) == 1:
        return func(*args, **kwargs)
    return by_element(func, args, kwargs)


def index_added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As experts are added up, each place once; or one after the other."""
    x, dim, index, y = args
    if index.numel() == index.unique().numel() and kwargs.get("alpha", 1) == 1:
        return func(*args, **kwargs)
    scaled = y * kwargs.get("alpha", 1)
    return _one_by_one(x, _places(x).index_select(dim, index), scaled)


def index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index, y, accumulate = (*args[:3], args[3] if len(args) > 3 else kwargs.get("accumulate"))
    if not accumulate or not x.is_floating_point():
        return func(*args, **kwargs)
    places = torch.ops.aten.index.Tensor(_places(x), index)
    return _one_by_one(x, places, y.expand(places.shape))


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device="cpu").view(x.shape)


def _one_by_one(x: Tensor, places: Tensor, y: Tensor) -> Tensor:
    """Adds y to places of x in the order of y, which torch does in one dimension."""
    return x.reshape(-1).index_add(0, places.reshape(-1), y.reshape(-1)).view(x.shape)
