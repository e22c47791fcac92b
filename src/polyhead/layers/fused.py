"""Parts of layers in training, in one pass where torch needs several.

    x / √(mean(x²) + ε) · (w + offset)      rotary positions      activation(gate) · up
    plus + dropout(x)                       [x W0ᵀ + b0, x W1ᵀ + b1, …]

Native code computes the first four and their derivatives, and each keeps for them only what it was
given (dropout its seed). Every function returns None where torch's own operations are to be used:
without gradients, without native code, and under anything that watches or transforms (compilation,
dispatch modes, torch.func, forward-mode derivatives). For second derivatives the backward pass uses
torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead.layers.linear import fused_linear, linear
from polyhead.layers.linear_gradients import recorded_linears
from polyhead.native.arguments import DIFFERENTIATED, NormWeight
from polyhead.native.code import Code
from polyhead.native.dropout import Dropout


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor | None:
    """An RMS norm of ``[..., E]`` in one dtype, or None."""
    if x.dtype is not weight.dtype or not x.numel() or not _is_recorded(x, weight):
        return None
    return _run(_Norm, x, weight, eps, offset)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """``x · cos + roll(x, D / 2) · sin`` of ``[B, T, N, D]``, or None; as ``Code.rotate``."""
    if x.stride(-1) != 1 or not x.numel() or not _is_recorded(x):
        return None
    return _run(_Rotation, x, cos, sin)


def gated(
    gate: Tensor, up: Tensor, activation: str, activate: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """``activation(gate) · up``, or None; ``activate`` is the activation by torch's operations."""
    if activation not in DIFFERENTIATED or gate.dtype is not up.dtype or not _is_recorded(gate, up):
        return None
    return _run(_Gated, gate, up, activation, activate)


def dropped(x: Tensor, p: float, plus: Tensor | None = None) -> Tensor:
    """``plus + dropout(x)``; ``plus`` may be of float32 where x is narrower, and then so is this.

    Args:
        x: Numbers that are set to zero with probability p, the rest scaled by 1 / (1 − p).
        p: Below 1; 0: nothing is dropped.
        plus: Tensor of x's shape that is added, or None.
    """
    mixes = plus is None or (plus.shape == x.shape and plus.dtype in (x.dtype, torch.float32))
    others = () if plus is None else (plus,)
    # Also without gradients: checkpoints compute first without and then with them.
    if not p > 0.0 or not mixes or native.code_with_autograd(x, *others) is None:
        y = F.dropout(x, p)
        return y if plus is None else plus + y
    # Drawn where torch would draw, so that a repeated computation repeats its dropout.
    return _run(_Dropped, x, plus, p, torch.randint(1 << 31, (1,), device="cpu"))


def linears(x: Tensor, *modules: nn.Module | None) -> tuple[Tensor, ...]:
    """The outputs of some linear modules on the same x, in as few passes as can be.

    A few rows read all weights in one native call, and the outputs are views of one tensor. With
    gradients, x is rounded once for all modules under autocast, and their gradients of x are added
    up where they are made. Otherwise module by module.

    Args:
        x: Input ``[..., in_features]``.
        *modules: Linear modules; any module is called, None is a TypeError.
    """
    if (joined := fused_linear(x, *modules)) is not None:
        widths: list[Any] = [module.out_features for module in modules if module is not None]
        return torch.split(joined, widths, dim=-1)
    return recorded_linears(x, modules) or tuple(linear(x, module) for module in modules)


def _is_recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and native.code_with_autograd(*tensors) is not None


def _run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


def _code() -> Code:
    code = native.code()
    if code is None:
        raise RuntimeError(native.unavailable())
    return code


def _dense(x: Tensor) -> Tensor:
    return x.detach().resolve_neg().contiguous()


def _again(formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Any:
    """The gradients by torch's operations, which can be differentiated; None of an input's data."""
    wanted, y = [x for x in inputs if x.requires_grad], formula(*inputs)
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True, materialize_grads=True))
    return [next(found) if x.requires_grad else None for x in inputs]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.numbers = eps, offset
        by = NormWeight(weight.detach().contiguous(), eps, offset)
        return _code().norm(rows, by).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight), (eps, offset) = grads, ctx.saved_tensors, ctx.numbers
        if torch.is_grad_enabled():

            def formula(x: Tensor, weight: Tensor) -> Tensor:
                wide = x.float()
                y = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
                scaled: Tensor = y * (weight.float() + offset)
                return scaled.to(x.dtype)

            return (*_again(formula, (x, weight), grad), None, None)
        rows = _dense(x).view(-1, x.shape[-1])
        of_x, of_weight = _code().norm_gradients(
            rows, weight.contiguous(), eps, offset, _dense(grad.to(x.dtype))
        )
        return of_x.view(x.shape), of_weight.to(weight.dtype), None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _code().rotate(x.detach(), cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        if grad.stride(-1) != 1 or grad.is_neg():
            grad = grad.resolve_neg().contiguous()
        # The inverse rotation: both halves of a table hold the same angles.
        return _run(_Rotation, grad, cos, -sin), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, activation: str, activate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.activate = activation, activate
        return _code().gated(_dense(gate), _dense(up), activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (gate, up) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _again(lambda gate, up: ctx.activate(gate) * up, (gate, up), grad)
            return (*found, None, None)
        parts = _dense(gate), _dense(up)
        grad = _dense(grad.to(gate.dtype))
        return (*_code().gated_gradients(*parts, ctx.activation, grad), None, None)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plus: Tensor | None, p: float, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p, ctx.dtype = p, x.dtype
        dense = None if plus is None else _dense(plus.detach())
        return _code().dropped(_dense(x.detach()), Dropout(p, seed, 0, 0), dense)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (seed,) = grads, ctx.saved_tensors
        of_plus = grad if ctx.needs_input_grad[1] else None
        return _run(_Dropped, grad.to(ctx.dtype), None, ctx.p, seed), of_plus, None, None
