"""Weights that stay as a file holds them: blocks of a few bits for each number.

Blocks of GGUF files have scales of their own; those of Hugging Face directories have them in
another tensor (``Scales``).

Native code reads the blocks in place for up to 8 rows, and unpacks each once for more. Without it,
and in bfloat16 on processors with matrix tiles, a panel of rows of the weight is unpacked at a time
and multiplied as any weight is. Inputs are not rounded to fewer bits unless that was asked for
(``int8_activations``): results are those of the unpacked weights, within the rounding of sums.

Gradients of inputs are those of the unpacked weights. What changes weights (training, conversion,
adapters) is refused by name, with the way out: a dtype given to ``load``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.layers.exact import ExactType
from polyhead.layers.gemm import as_rows, code_for
from polyhead.native import batch_invariant, tensor_check
from polyhead.native.arguments import INT8_ACTIVATIONS, Scales, Weight
from polyhead.quantization import BlockType, of_rows, readable, unpack

_PANEL = 1 << 20  # numbers that are unpacked at a time: what a large cache holds
_WAY_OUT = "load the model with dtype='float32' (or 'bfloat16'), which unpacks them"


class QuantizedMatrix(nn.Module):
    """``[out_features, in_features]`` numbers in blocks.

    Args:
        blocks: ``[out_features, bytes of a row]`` uint8; a file mapped into memory stays there.
        kind: Type of the blocks.
        scales: Of blocks that have none of their own.

    Attributes:
        blocks: As given; a buffer, which no optimiser finds.
        scales: Likewise, None where blocks have their own; ``to`` moves it but keeps its dtype.
        zeros: Likewise.
        int8_activations: Whether products round x to 8 bits, 32 numbers at a time.
        like: Empty; its dtype is that of numbers made of the blocks, and follows ``to``.
    """

    blocks: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    like: Tensor

    def __init__(self, blocks: Tensor, kind: BlockType, scales: Scales | None = None) -> None:
        super().__init__()
        self.kind, self.int8_activations = kind, False
        self.out_features, self.in_features = blocks.shape[0], kind.row_numbers(blocks.shape[1])
        self.register_buffer("blocks", blocks)
        self.register_buffer("scales", None if scales is None else scales.scales)
        self.register_buffer("zeros", None if scales is None else scales.zeros)
        self._shares = (0, 0) if scales is None else (scales.numbers, scales.rows)
        like = torch.empty(0, dtype=torch.float32, device=blocks.device)
        self.register_buffer("like", like, persistent=False)

    @property
    def weight(self) -> Tensor:
        """All numbers, unpacked anew at each access; changes to them are lost."""
        return unpack(self.blocks, self.kind, self.like.dtype, self.separate_scales)

    @property
    def separate_scales(self) -> Scales | None:
        """Separate scale tensors (Hugging Face formats), or None for GGUF blocks."""
        scales = self._buffers["scales"]
        return None if scales is None else Scales(scales, self._buffers["zeros"], *self._shares)

    def rows(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """``[rows, in_features]`` numbers of the rows ``[rows]`` chosen."""
        scales = self.separate_scales
        by = None if scales is None else of_rows(scales, chosen)
        return unpack(self.blocks[chosen], self.kind, dtype, by)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + b`` for x ``[..., in_features]``, in the dtype of x.

        Raises:
            UnsupportedError: Gradients through x that is rounded to 8 bits.
        """
        if not (x.requires_grad or (bias is not None and bias.requires_grad)):
            with torch.no_grad():
                y = self._natively(x, bias)
            if y is not None:
                return y
        if self.int8_activations:
            if x.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    "gradients need x as it is, and activations='int8' rounds it: load the model "
                    "without activations"
                )
            x = int8_activations(x)
        rows = max(1, _PANEL // self.in_features)
        parts = [
            F.linear(
                x,
                self._panel(first, rows, x.dtype),
                None if bias is None else bias[first : first + rows],
            )
            for first in range(0, self.out_features, rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _panel(self, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Numbers of some rows from the first on."""
        blocks, scales = self.blocks[first : first + rows], self.separate_scales
        if scales is not None:
            scales = of_rows(scales, torch.arange(first, first + len(blocks), device=blocks.device))
        return unpack(blocks, self.kind, dtype, scales)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Conversions to another dtype are for numbers made of blocks, not for their scales."""
        scales = self.scales
        moved = None if scales is None else fn(scales.view(torch.uint8)).view(scales.dtype)
        buffers, parameters = dict(self._buffers), [(p, p.data) for p in self.parameters(False)]
        self.scales = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except BaseException:  # a module that could not be moved is as it was
            self._buffers.update(buffers)
            for parameter, data in parameters:
                parameter.data = data
            raise
        self.scales = moved
        return self

    def _natively(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product by native code, or None."""
        code = code_for(x)
        if code is None or x.shape[-1] != self.in_features:
            return None
        weight = native_weight(self, x, bias)
        if weight is None:
            return None
        return code.product(
            as_rows(x), [weight], batch_invariant=batch_invariant.is_enabled()
        ).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, type={self.kind}"


class QuantizedLinear(QuantizedMatrix):
    """A linear module with a quantized weight, in place of an ``nn.Linear``.

    Args:
        blocks: As in ``QuantizedMatrix``.
        kind: Type of the blocks.
        bias: ``[out_features]`` or None; a parameter without a gradient.
        scales: As in ``QuantizedMatrix``.
    """

    bias: Tensor | None

    def __init__(
        self,
        blocks: Tensor,
        kind: BlockType,
        bias: Tensor | None = None,
        scales: Scales | None = None,
    ) -> None:
        super().__init__(blocks, kind, scales)
        made = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", made)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return self.product(x, self._parameters["bias"])

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, type={self.kind}"
        )


class QuantizedEmbedding(QuantizedMatrix):
    """A table with quantized rows, in place of an ``nn.Embedding``."""

    def forward(self, ids: Tensor) -> Tensor:
        """``[...]`` whole numbers to ``[..., in_features]``."""
        found = self.rows(ids.flatten(), self.like.dtype)
        return found.view(*ids.shape, self.in_features)


def int8_activations(x: Tensor) -> Tensor:
    """x rounded to 8 bits as products with blocks do it: 32 numbers share a scale, max |x| / 127.

    Args:
        x: ``[..., n]``, n a multiple of 32.

    Returns:
        The same shape and dtype, not finite in all 32 numbers of which one is not.
    """
    runs = x.float().reshape(*x.shape[:-1], -1, 32)
    most = runs.abs().amax(-1, keepdim=True)
    quotient = torch.full_like(most, 127) / most  # 127 / most rounds twice: a reciprocal first
    by = torch.where(most > 1e-30, quotient, torch.zeros_like(most))
    scale = torch.where(most.isfinite(), most / 127, torch.full_like(most, torch.nan))
    codes = (runs.double() * by.double()).round().float()  # rounded once, as multiply-add does
    return (codes * scale).reshape(x.shape).to(x.dtype)


QUANTIZED_LINEAR = ExactType(QuantizedLinear)


def native_weight(matrix: QuantizedMatrix, x: Tensor, bias: Tensor | None) -> Weight | None:
    """The arguments of native code, or None if it cannot be used."""
    code, blocks, scales = native.code(), matrix._buffers["blocks"], matrix.separate_scales
    if (
        code is None
        or blocks is None
        or not _is_read(blocks)
        or not (scales is None or (_is_read(scales.scales) and _is_read(scales.zeros)))
        or not readable(code, matrix.kind)
        or (bias is not None and not native.is_plain(bias, x))
    ):
        return None
    number = matrix.kind.number + (INT8_ACTIVATIONS if matrix.int8_activations else 0)
    return Weight(blocks, bias, number, scales)


def _is_read(x: Tensor | None) -> bool:
    return x is None or (x.is_contiguous() and tensor_check.is_plain(x))


def refuse_quantized(model: nn.Module, what: str) -> None:
    """Raises UnsupportedError if weights of a model are blocks, which ``what`` cannot change.

    Args:
        model: Whose parts are looked at.
        what: The beginning of the message: ``"training"``.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantizedMatrix):
            raise UnsupportedError(
                f"{what} needs weights that are numbers, and {name} holds {module.kind} blocks as "
                f"its file does: {_WAY_OUT}"
            )
