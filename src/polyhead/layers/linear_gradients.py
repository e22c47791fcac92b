"""Linear layers with gradients, by native products where those are faster.

Some on the same input are one node of the graph:

    y_i = x W_iᵀ + b_i        ∂x = Σ_i ∂y_i W_i        ∂W_i = ∂y_iᵀ x        ∂b_i = Σ ∂y_i

torch multiplies float32 with vectors of 8 on AMD processors, and float16 hardly at all; native
products of more than ``MAX_STEP_ROWS`` rows reach nine tenths of what registers do, however the
factors lie. Second derivatives are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead.layers.exact import ExactType
from polyhead.layers.gemm import as_rows
from polyhead.native import batch_invariant, tensor_check
from polyhead.native.arguments import MAX_STEP_ROWS, Weight
from polyhead.native.code import Code

PLAIN_LINEAR = ExactType(nn.Linear)


def recorded_linear(x: Tensor, module: nn.Module | None) -> Tensor | None:
    """The output of a linear module with gradients, or None where torch's is as fast."""
    found = recorded_linears(x, (module,)) if _is_faster(x) else None
    return None if found is None else found[0]


def recorded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The same for a weight ``[out, in]`` and bias ``[out]`` that stand in no linear module."""
    found = _recorded(x, (weight,), (bias,)) if _is_faster(x) else None
    return None if found is None else found[0]


def recorded_linears(x: Tensor, modules: Sequence[nn.Module | None]) -> tuple[Tensor, ...] | None:
    """The outputs of linear modules as one node of the autograd graph, or None.

    None without gradients, under anything that watches or transforms, and for modules other than
    ``nn.Linear``, with hooks, or in other dtypes than x. Under autocast x is rounded once for all.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if any(module is None or not _is_unhooked(module) for module in modules):
        return None
    weights = [module._parameters["weight"] for module in modules if module is not None]
    biases = [module._parameters["bias"] for module in modules if module is not None]
    return _recorded(x, weights, biases)


def _recorded(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...] | None:
    tensors = [part for part in (*weights, *biases) if part is not None]
    if native.code_with_autograd(x, *tensors) is None:
        return None
    dtype = _dtype(x)
    if not torch.is_autocast_enabled("cpu") and any(part.dtype is not dtype for part in tensors):
        return None
    parts = [None if part is None else part.to(dtype) for part in (*weights, *biases)]
    found: tuple[Tensor, ...] = _Linears.apply(x.to(dtype), *parts)  # type: ignore[no-untyped-call]
    return found


def _dtype(x: Tensor) -> torch.dtype:
    """That linear layers compute in."""
    autocast = torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if autocast else x.dtype


def _is_faster(x: Tensor) -> bool:
    """Whether gradients are recorded, and native products of so many rows are faster."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return x.numel() > MAX_STEP_ROWS * x.shape[-1] and _faster_code(_dtype(x)) is not None


def _is_unhooked(module: nn.Module) -> bool:
    fields, everywhere = module.__dict__, nn.modules.module
    return PLAIN_LINEAR.is_exact_and_unhooked(module) and not (
        fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def _faster_code(dtype: torch.dtype) -> Code | None:
    """Native code whose products of many rows of this dtype, by rows or columns, are faster."""
    code = native.code(dtype)
    if code is None or dtype not in code.matmul_dtypes or batch_invariant.is_enabled():
        return None
    return code


def _code_for(a: Tensor, b: Tensor) -> Code | None:
    """The same, if it can multiply these."""
    plain = tensor_check.is_plain(a) and tensor_check.is_plain(b)
    if not plain or len(a) <= MAX_STEP_ROWS or not a.numel() or not b.numel():
        return None
    return _faster_code(a.dtype)


def matmul(a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """``plus + a b`` of matrices without gradients, written to ``plus`` where it is given."""
    code = _code_for(a, b)
    if code is None:
        return a @ b if plus is None else plus.addmm_(a, b)
    if 1 not in a.stride():
        a = a.contiguous()
    if not (b.is_contiguous() or b.mT.is_contiguous()):
        b = b.contiguous()
    return code.matmul(a, b, plus)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + b``, without gradients."""
    rows = as_rows(x)
    code = _code_for(rows, weight)
    parts = (weight,) if bias is None else (weight, bias)
    fits = weight.shape[1:] == x.shape[-1:] and all(native.is_plain(each, x) for each in parts)
    if code is None or not fits:
        return F.linear(x, weight, bias)
    y = code.product(rows, [Weight(weight, bias)], batch_invariant=False)
    return y.view(*x.shape[:-1], -1)


class _Linears(torch.autograd.Function):
    """``x Wᵀ + b`` for weights and as many biases or None, all of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parts)
        ctx.set_materialize_grads(False)
        return _each(linear, x, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if torch.is_grad_enabled():
            outs = _each(F.linear, x, parts)
            given = [(i, grad) for i, grad in given if outs[i].requires_grad]
            leaves = [part for part in (x, *parts) if part is not None and part.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [outs[i] for i, _ in given], leaves, [grad for _, grad in given],
                    create_graph=True, allow_unused=True,
                )
            )  # fmt: skip
            wanted = (part is not None and part.requires_grad for part in (x, *parts))
            return tuple(next(found) if there else None for there in wanted)
        rows, count = x.reshape(-1, x.shape[-1]), len(grads)
        of_x: Tensor | None = None
        of_parts: list[Tensor | None] = [None] * len(parts)
        needs_x, *needs = ctx.needs_input_grad
        for i, grad in given:
            flat = grad.reshape(-1, grad.shape[-1])
            if needs_x:
                of_x = matmul(flat, parts[i], of_x)
            if needs[i]:
                of_parts[i] = matmul(flat.mT, rows)
            if needs[count + i]:
                of_parts[count + i] = flat.sum(dim=0)
        return None if of_x is None else of_x.view(x.shape), *of_parts


def _each(of: Any, x: Tensor, parts: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """For all weights of ``parts``, after which the biases come."""
    count = len(parts) // 2
    return tuple(
        of(x, weight, bias)
        for weight, bias in zip(parts[:count], parts[count:], strict=True)
        if weight is not None
    )
