"""Products of rows with weights, by native code.

    [q | k | v] = x · [Wq; Wk; Wv]ᵀ + [bq; bk; bv]         down(act(gate(x)) · up(x))

Reading weights is what decoding waits for. The native code reads every weight once, in the order of
memory, by all threads, which is two to three times as fast as torch's product of one row; it reads
the parameters themselves, so there is no copy that could grow stale. Prompts take it where it is
as fast as torch's product (``gemm.py``), and with gradients where it is faster
(``linear_gradients.py``). Everything that watches or transforms a computation takes the modules as
they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyhead import native
from polyhead.layers.exact import ExactType
from polyhead.layers.gemm import as_rows, code_for, code_for_gemm
from polyhead.layers.linear_gradients import PLAIN_LINEAR, recorded_linear, recorded_product
from polyhead.layers.quantized import QUANTIZED_LINEAR, QuantizedMatrix, native_weight
from polyhead.native import batch_invariant, tensor_check
from polyhead.native.arguments import (
    MAX_GEMV_ROWS,
    MAX_STEP_ROWS,
    MAX_WEIGHTS,
    Network,
    Weight,
)

WITH_CHANGE: dict[type, ExactType[Any]] = {}
"""Modules that are their ``base`` while not ``active``; the module of each adds it here."""


def fused_linear(x: Tensor, *linears: nn.Module | None) -> Tensor | None:
    """The outputs of all ``linears``, next to each other; None where that cannot be.

    Args:
        x: ``[..., in_features]``.
        *linears: At most 4 modules, which are called one by one where this returns None.

    Returns:
        ``[..., sum of out_features]``, equal to the separate outputs within rounding. None for
        an empty input; more than 8 rows of several modules; where torch is faster (``gemm.py``);
        with gradients enabled; off the CPU or without native code; under autocast, a dispatch mode,
        functorch or compilation; for modules other than ``nn.Linear`` and ``QuantizedLinear``, or
        with hooks.
    """
    code = code_for_gemm(x)
    if code is None or len(linears) > MAX_WEIGHTS:
        return None
    if len(linears) > 1 and x.numel() > MAX_GEMV_ROWS * x.shape[-1]:
        return None  # of many rows each output is let go of when it is no longer needed
    weights = []
    for linear in linears:
        weight = weight_of(_without_inactive_change(linear), x)
        if weight is None:
            return None
        weights.append(weight)
    return code.product(as_rows(x), weights, batch_invariant=batch_invariant.is_enabled()).view(
        *x.shape[:-1], -1
    )


def linear(x: Tensor, module: nn.Module | None) -> Tensor:
    """``module(x)``, by native code where that can be done."""
    y = fused_linear(x, module)
    if y is None:
        y = recorded_linear(x, module)
    if y is not None:
        return y
    if module is None:
        raise TypeError("a projection must be a module: got None")
    out: Tensor = module(x)
    return out


def product(x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + b`` for a weight ``[out, in]`` and bias ``[out]`` that stand in no linear module."""
    if isinstance(weight, QuantizedMatrix):
        return weight.product(x, bias)
    code = code_for_gemm(x)
    if code is None or not _fits(Weight(weight, bias), x):
        found = recorded_product(x, weight, bias)
        return nn.functional.linear(x, weight, bias) if found is None else found
    y = code.product(
        as_rows(x), [Weight(weight, bias)], batch_invariant=batch_invariant.is_enabled()
    )
    return y.view(*x.shape[:-1], -1)


def linear_per_head(x: Tensor, weight: Tensor, *, transposed: bool) -> Tensor | None:
    """A product for each head of a few rows, or None as ``fused_linear``.

    Args:
        x: ``[B, T, H, in]``, the last dimension dense.
        weight: ``[H, in, out]`` where transposed, else ``[H, out, in]``; the last two dense.
        transposed: Whether weights lie with ``in`` first.

    Returns:
        ``[B, T, H, out]``.
    """
    B, T, H, _ = x.shape
    code = native.code_for(x)
    if (
        code is None
        or not B * T > 0
        or (B * T > MAX_STEP_ROWS and not batch_invariant.is_enabled())
        or not x.numel()
        or weight.dtype is not x.dtype
        or not tensor_check.is_plain(weight)
    ):
        return None
    return code.head_product(x.reshape(B * T, H, -1), weight, summed=transposed).view(B, T, H, -1)


def feed_forward(
    x: Tensor,
    gate: nn.Module | None,
    up: nn.Module | None,
    down: nn.Module | None,
    form: tuple[int, float, float, tuple[Tensor, Tensor] | None],
) -> Tensor | None:
    """``down(activation(gate(x)) · up(x))`` of rows, or None as ``fused_linear``.

    Without a gate: ``down(activation(up(x)))``. What lies between the products stays float32,
    except that many rows of bfloat16 are multiplied as such.

    Args:
        x: ``[..., E]``.
        gate: A linear module, or None.
        up: Linear module of the up projection.
        down: Linear module of the down projection.
        form: The last four fields of ``Network``.
    """
    up = _without_inactive_change(up)
    # Blocks are multiplied by native code in any case.
    code = code_for(x) if QUANTIZED_LINEAR.is_class(up) else code_for_gemm(x)
    if code is None:
        return None
    gate_weight = None if gate is None else weight_of(_without_inactive_change(gate), x)
    up_weight = weight_of(up, x)
    if up_weight is None or (gate_weight is None and gate is not None):
        return None
    down_weight = weight_of(_without_inactive_change(down), x, up_weight[0].shape[0])
    if down_weight is None:
        return None
    y = code.feed_forward(
        as_rows(x),
        Network(gate_weight, up_weight, down_weight, *form),
        batch_invariant=batch_invariant.is_enabled(),
    )
    return y.view(*x.shape[:-1], -1)


def _without_inactive_change(module: nn.Module | None) -> nn.Module | None:
    """The base of a module whose change beside it is inactive."""
    kind = WITH_CHANGE.get(type(module))
    if kind is not None and kind.is_exact_and_unhooked(module) and not module.active:
        base: nn.Module = module.base
        return base
    return module


def weight_of(module: nn.Module | None, x: Tensor, inputs: int | None = None) -> Weight | None:
    """Weight and bias of a plain linear module without hooks, if they fit.

    Args:
        module: An ``nn.Linear`` or ``QuantizedLinear``, exactly; anything else gives None.
        x: Whose dtype they must have.
        inputs: Features that the weight must read; default those of x.
    """
    if QUANTIZED_LINEAR.is_exact_and_unhooked(module):
        fits = module.in_features == (x.shape[-1] if inputs is None else inputs)
        return native_weight(module, x, module._parameters["bias"]) if fits else None
    if not PLAIN_LINEAR.is_exact_and_unhooked(module):
        return None
    parameters = module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if weight is None or not _fits(Weight(weight, bias), x, inputs):
        return None
    return Weight(weight, bias)


def _fits(pair: Weight, x: Tensor, inputs: int | None = None) -> bool:
    weight, bias = pair.weight, pair.bias
    return (
        native.is_plain(weight, x)
        and weight.shape[1] == (x.shape[-1] if inputs is None else inputs)
        and (bias is None or native.is_plain(bias, x))
    )
