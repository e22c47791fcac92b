"""Several projections of one input as one matrix product over a packed weight.

    [q | k | v] = x · [Wq; Wk; Wv]ᵀ + [bq; bk; bv]

Reading weights is what decoding waits for. oneDNN reads a weight that it has laid out for itself
almost twice as fast as a row-major one, and one product over joined rows starts one kernel instead
of three. So where no gradient is wanted, a ``FusedLinear`` keeps a packed copy of the rows and
multiplies by that. The parameters stay what they are: state dicts, optimisers and files know
nothing of the copy, which costs as many bytes as the weights themselves (``packing(False)`` does
without).

The copy is remade as soon as a parameter is not what it was: another object, another storage,
another version (every in-place operation counts one), or another fingerprint. The fingerprint, 64
elements spread over rows and columns, is for edits through ``.data``, which PyTorch itself does
not count; an edit of a few elements that way can escape it, an edit through
``with torch.no_grad(): weight[...] = value`` cannot. Reading it touches 64 cold lines of memory, as
long as a small product takes, so it is read where x has several rows (a prompt, a batch) and not
for every token of a decoding loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

_Pair = tuple[Tensor | None, Tensor | None]
"""A weight and its bias."""

_SAMPLES = 64
_FEW_ROWS = 16
"""Rows of a float32 input up to which the packed product is used: it rounds up to 1.9 times worse
than the plain one, which a long text shows, and is faster by a few percent only there."""
_enabled = True


@contextmanager
def packing(enabled: bool) -> Iterator[None]:
    """Within the block, packed copies of weights are (or are not) made and used."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


class FusedLinear:
    """A packed copy of the rows of one or several ``nn.Linear``, made when first needed.

    Copies and pickles of it are empty: they pack again.
    """

    __slots__ = ("_bias", "_seen", "_weight")

    def __init__(self) -> None:
        self.drop()

    def __call__(self, x: Tensor, *linears: nn.Module | None) -> Tensor | None:
        """The outputs of all ``linears`` for ``x``, side by side; None where that cannot be done.

        Args:
            x: ``[..., in_features]``.
            *linears: Modules that are called one by one where this returns None.

        Returns:
            ``[..., sum of out_features]``, equal to the separate outputs within rounding. None
            where gradients are on, or for another device than a CPU, a dtype other than float32
            and bfloat16, anything that watches or transforms the computation (autocast, a
            dispatch mode, functorch, compilation), or modules that are not plain ``nn.Linear``
            without hooks.
        """
        if not _may_use_copies(x):
            return None
        pairs: list[_Pair] = []
        for linear in linears:
            if (
                type(linear) is not nn.Linear
                or linear._forward_hooks
                or linear._forward_pre_hooks
                or "forward" in linear.__dict__
            ):
                return None
            parameters = linear._parameters
            pairs.append((parameters["weight"], parameters["bias"]))
        return self._product(x, pairs)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """As a call, for a weight ``[out, in]`` and bias ``[out]`` that stand in no module."""
        return self._product(x, [(weight, bias)]) if _may_use_copies(x) else None

    def drop(self) -> None:
        """Frees the packed copy."""
        self._seen: list[_Seen] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def _product(self, x: Tensor, pairs: list[_Pair]) -> Tensor | None:
        if x.dtype is torch.float32 and x.numel() > _FEW_ROWS * x.shape[-1]:
            return None
        seen = self._seen
        current = len(seen) == len(pairs)
        if current:
            closely = x.numel() > x.shape[-1]
            for pair, then in zip(pairs, seen, strict=True):
                if not then.still(*pair, closely=closely):
                    current = False
                    break
        if not current and not self._pack(pairs):
            return None
        packed = self._weight
        if packed is None or x.dtype is not packed.dtype:
            return None
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, packed, self._bias, "none", [], ""
        )
        return y

    def _pack(self, pairs: list[_Pair]) -> bool:
        weights = [weight for weight, _ in pairs if weight is not None]
        if len(weights) != len(pairs) or not _can_pack(weights[0].dtype):
            return False
        self.drop()
        for weight, bias in pairs:
            if not _packable(weight, weights[0]):
                return False
            if bias is not None and not _packable(bias, weights[0]):
                return False
        rows = [weight.detach() for weight in weights]
        with torch.inference_mode(False), torch.no_grad():
            joined = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
            # 16 rows of x: the layout is good from one token to a long prompt.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(joined, 16)
            if any(bias is not None for _, bias in pairs):
                self._bias = torch.cat(
                    [
                        row.new_zeros(len(row)) if bias is None else bias.detach()
                        for row, (_, bias) in zip(rows, pairs, strict=True)
                    ]
                )
        self._seen = [
            _Seen(weight, None if bias is None else _Seen(bias, None))
            for weight, (_, bias) in zip(weights, pairs, strict=True)
        ]
        return True

    def __copy__(self) -> FusedLinear:
        return FusedLinear()

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedLinear:
        return FusedLinear()

    def __reduce__(self) -> tuple[type[FusedLinear], tuple[()]]:
        return FusedLinear, ()


class PacksWeights(nn.Module):
    """A module with ``FusedLinear`` attributes, freed when they go stale as a whole."""

    def drop_packed(self) -> None:
        """Frees the packed copies of this module's own weights."""
        for value in vars(self).values():
            if isinstance(value, FusedLinear):
                value.drop()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.drop_packed()
        module: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return module

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.drop_packed()
        return super().train(mode)


class _Seen:
    """What a parameter, and the bias that belongs to it, were when they were packed."""

    __slots__ = ("address", "bias", "fingerprint", "parameter", "sample", "version")

    def __init__(self, parameter: Tensor, bias: _Seen | None) -> None:
        memory = parameter.detach().as_strided((parameter.numel(),), (1,))
        whole = torch.int32 if parameter.dtype == torch.float32 else torch.int16
        self.parameter, self.bias = parameter, bias
        self.version, self.address = parameter._version, parameter.data_ptr()
        # A view of the parameter's memory, as whole numbers. It keeps that memory from being
        # freed, so that a parameter which moved and came back is not found at the old address.
        self.sample = memory.view(whole)[:: _stride(parameter)].numpy()
        self.fingerprint = self.sample.tobytes()

    def still(
        self, parameter: Tensor | None, bias: Tensor | None = None, *, closely: bool = True
    ) -> bool:
        """Whether it is what it was; ``closely`` reads the fingerprint too."""
        return (
            parameter is self.parameter
            and parameter._version == self.version
            and parameter.data_ptr() == self.address
            and (not closely or self.sample.tobytes() == self.fingerprint)
            and (bias is None if self.bias is None else self.bias.still(bias, closely=closely))
        )


def _stride(parameter: Tensor) -> int:
    """A step through memory that visits about 64 elements, spread over rows and columns alike."""
    step = max(1, parameter.numel() // _SAMPLES)
    if parameter.ndim < 2 or step == 1:
        return step
    # Golden-ratio steps along the columns leave no gap wider than about two in 64 of them.
    columns = parameter.shape[-1]
    return max(1, step - step % columns + round(columns * (math.sqrt(5) - 1) / 2))


def _packable(parameter: Tensor | None, like: Tensor) -> bool:
    return (
        parameter is not None
        and type(parameter) in (nn.Parameter, Tensor)
        and parameter.is_cpu
        and parameter.dtype is like.dtype
        and parameter.numel() > 0
        and (parameter.is_contiguous() or (parameter.ndim == 2 and parameter.mT.is_contiguous()))
        # Inference tensors count no versions, so a change could not be seen.
        and not parameter.is_inference()
    )


def _may_use_copies(x: Tensor) -> bool:
    """Whether operations on ``x`` run as written: no gradient, nobody watching or transforming."""
    return not (
        torch.is_grad_enabled()
        or not _enabled
        or type(x) is not Tensor
        or not x.is_cpu
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cpu")
    )


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype here, and multiplies by them rightly."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.linspace(-1, 1, 48 * 40, device="cpu").view(48, 40).to(dtype)
        x = torch.linspace(-1, 1, 3 * 40, device="cpu").view(3, 40).to(dtype)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
            y = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):
            return False
        return torch.allclose(y.float(), x.float() @ weight.float().mT, rtol=2e-2, atol=2e-2)


def linear(pack: FusedLinear, x: Tensor, module: nn.Module | None) -> Tensor:
    """``module(x)``, by the packed weight where that can be done."""
    y = pack(x, module)
    if y is not None:
        return y
    if module is None:
        raise TypeError("a projection must be a module: got None")
    out: Tensor = module(x)
    return out
