"""Sums along dimensions in an order of their length alone, and what is made of such sums."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.batch_invariant.elements import by_element, only_whole_numbers


def halved(x: Tensor) -> Tensor:
    """Sums along the last dimension, in an order that depends on its length alone."""
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    while (n := x.shape[-1]) > 1:
        half = n // 2
        y = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((y, x[..., 2 * half :]), dim=-1) if n % 2 else y
    return x[..., 0]


def sums(x: Tensor, dims: Any, keep: bool) -> Tensor:
    """Over some dimensions, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    chosen = range(x.ndim) if dims is None or dims == [] else [d % x.ndim for d in dims]
    rest = [d for d in range(x.ndim) if d not in chosen]
    found = halved(wide.permute(*rest, *chosen).reshape(*(x.shape[d] for d in rest), -1))
    return found.view([1 if d in chosen else x.shape[d] for d in range(x.ndim)]) if keep else found


def total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not x.is_floating_point():
        return func(*args, **kwargs)
    dims = args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else False
    return sums(x, dims, keep).to(kwargs.get("dtype") or x.dtype)


def average(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else False
    total = sums(x, dims, keep)
    count = x.numel() // max(1, total.numel())
    return (total / count).to(kwargs.get("dtype") or x.dtype)


def vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else 2
    if order != 2:
        return only_whole_numbers(func, args, kwargs)
    dims = args[2] if len(args) > 2 else None
    keep = args[3] if len(args) > 3 else False
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return sums(wide * wide, dims, keep).sqrt().to(kwargs.get("dtype") or x.dtype)


def softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1]
    weights, total = _exponentials(x, dim)
    return (weights / total).to(torch.float32 if len(args) > 2 and args[2] else x.dtype)


def log_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1]
    _, total = _exponentials(x, dim)
    wide = x.to(total.dtype)
    found = wide - wide.amax(dim, keepdim=True) - by_element(_LOG, (total,), {})
    return found.to(torch.float32 if len(args) > 2 and args[2] else x.dtype)


def logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dims = args[0], args[1]
    keep = args[2] if len(args) > 2 else False
    most = x.amax(dims, keepdim=True)
    most = torch.where(most.isfinite(), most, torch.zeros_like(most))
    total = sums(by_element(_EXP, (x - most,), {}), dims, keep)
    return (by_element(_LOG, (total,), {}) + most.view(total.shape)).to(x.dtype)


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not wide.numel():
        return wide, wide.new_ones(())
    weights = by_element(_EXP, (wide - wide.amax(dim, keepdim=True),), {})
    return weights, sums(weights, [dim], True)


_EXP, _LOG = torch.ops.aten.exp.default, torch.ops.aten.log.default


def layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape, weight, bias, eps = args
    dims, wide = range(-len(shape), 0), x.to(torch.promote_types(x.dtype, torch.float32))
    count = math.prod(shape)
    mean = sums(wide, dims, True) / count
    centred = wide - mean
    scale = 1.0 / (sums(centred * centred, dims, True) / count + eps).sqrt()
    y = centred * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype), mean, scale


def layer_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, x, shape, mean, scale, weight, bias, wanted = args
    dims, dtype = range(-len(shape), 0), x.dtype
    change = grad.to(torch.promote_types(dtype, torch.float32))
    y, scaled = (x - mean) * scale, change if weight is None else change * weight
    count = math.prod(shape)
    means = (sums(each, dims, True) / count for each in (scaled, scaled * y))
    of_mean, of_scale = means
    of_x = (scale * (scaled - of_mean - y * of_scale)).to(dtype)
    outer = range(x.ndim - len(shape))
    of_weight = None if weight is None else sums(change * y, outer, False).to(weight.dtype)
    of_bias = None if bias is None else sums(change, outer, False).to(bias.dtype)
    found = (of_x, of_weight, of_bias)
    return tuple(part if asked else None for part, asked in zip(found, wanted, strict=True))


def softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, y, dim, dtype = args
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    product = grad * wide
    return (product - wide * sums(product, [dim], True)).to(dtype)


def log_softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, y, dim, dtype = args
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    change = grad.to(wide.dtype)
    return (change - by_element(_EXP, (wide,), {}) * sums(change, [dim], True)).to(dtype)


def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One after another along a dimension: sums that a CPU adds up in no other order."""
    return func(*args, **kwargs)
