"""Products by native code, which adds up every row in one order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.kernels.batch_invariant.elements import only_whole_numbers
from polyhead.kernels.batch_invariant.reductions import sums
from polyhead.native.arguments import DTYPES, Weight


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b``, every row with the bits that it has alone."""
    code = native.code()
    if code is None or x.dtype not in DTYPES or not x.is_cpu or weight.dtype is not x.dtype:
        raise UnsupportedError(
            "batch_invariant() multiplies float32, bfloat16 and float16 on a CPU: got "
            f"{x.dtype} and {weight.dtype} on {x.device}".replace("torch.", "")
        )
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.numel() or not weight.numel():
        return torch.nn.functional.linear(x, weight, bias)
    y = code.product(
        rows, [Weight(weight.contiguous(), None if bias is None else bias.contiguous())]
    )
    return y.view(*x.shape[:-1], len(weight))


def mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return product(args[0], args[1].mT)


def mv(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return product(args[1][None], args[0])[0]


def dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return sums(args[0] * args[1], None, False).to(args[0].dtype)


def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return product(*args)


def addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, x, weight = args
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return only_whole_numbers(func, args, kwargs)
    if bias.ndim == 1 and bias.shape[0] == weight.shape[1]:
        return product(x, weight.mT, bias)
    return bias + product(x, weight.mT)


def bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, y = args
    if not len(x):
        return func(*args, **kwargs)
    return torch.stack([product(a, b.mT) for a, b in zip(x.unbind(), y.unbind(), strict=True)])


def baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return only_whole_numbers(func, args, kwargs)
    return args[0] + bmm(func, args[1:], {})


def convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of each window ``[C · k]`` with the weight, as patches and sound are read.

    Where each channel has a weight of its own, the numbers of a window are added up in order.
    """
    x, weight, bias, strides, padding, dilation, transposed, _, groups = args
    by_channel = groups == x.shape[1] == len(weight) and weight.ndim == 3
    if transposed or any(d != 1 for d in dilation) or weight.ndim < 3:
        return only_whole_numbers(func, args, kwargs)
    if groups != 1 and not by_channel:
        return only_whole_numbers(func, args, kwargs)
    spatial = weight.ndim - 2
    by, room = (list(sizes) * (spatial if len(sizes) == 1 else 1) for sizes in (strides, padding))
    windows = torch.constant_pad_nd(x, [side for each in reversed(room) for side in (each, each)])
    for d in range(spatial):
        windows = windows.unfold(2 + d, weight.shape[2 + d], by[d])
    if groups != 1:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.zeros((), dtype=wide) if bias is None else bias.to(wide)[:, None]
        for numbers, by in zip(windows.unbind(-1), weight[:, 0].unbind(-1), strict=True):
            y = y + numbers.to(wide) * by.to(wide)[:, None]
        return y.to(x.dtype)
    places = range(2, 2 + spatial)
    rows = windows.permute(0, *places, 1, *(2 + spatial + d for d in range(spatial)))
    y = product(rows.reshape(*rows.shape[: 1 + spatial], -1), weight.flatten(1), bias)
    return y.movedim(-1, 1)
