"""Weights that stay as a GGUF file holds them: blocks of a few bits for each number.

Native code reads the blocks in place for up to 8 rows, and unpacks each once for more. Without it,
and in bfloat16 on processors with matrix tiles, a panel of rows of the weight is unpacked at a time
and multiplied as any weight is. Inputs are not rounded to fewer bits unless that was asked for
(``eights.py``): results are those of the unpacked weights, within the rounding of sums.

Gradients of inputs are those of the unpacked weights. What changes weights (training, conversion,
adapters) is refused by name, with the way out: a dtype given to ``load``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.layers.exact import Exactly
from polyhead.layers.rows import as_rows, code_for_blocks, code_for_eights
from polyhead.native import by_row, gate
from polyhead.native.arguments import IN_EIGHTS, Weight
from polyhead.quantization import BlockType, readable, unpack

_PANEL = 1 << 20  # numbers that are unpacked at a time: what a large cache holds
_WAY_OUT = "load the model with dtype='float32' (or 'bfloat16'), which unpacks them"


class QuantizedMatrix(nn.Module):
    """``[out_features, in_features]`` numbers in blocks.

    Args:
        blocks: ``[out_features, bytes of a row]`` uint8; a file mapped into memory stays there.
        kind: Type of the blocks.

    Attributes:
        blocks: As given; a buffer, which no optimiser finds.
        in_eights: Whether products round x to 8 bits, 32 numbers at a time.
        like: Empty; its dtype is that of numbers made of the blocks, and follows ``to``.
    """

    blocks: Tensor
    like: Tensor

    def __init__(self, blocks: Tensor, kind: BlockType) -> None:
        super().__init__()
        self.kind, self.in_eights = kind, False
        self.out_features, self.in_features = blocks.shape[0], kind.row_numbers(blocks.shape[1])
        self.register_buffer("blocks", blocks)
        like = torch.empty(0, dtype=torch.float32, device=blocks.device)
        self.register_buffer("like", like, persistent=False)

    @property
    def weight(self) -> Tensor:
        """All numbers, unpacked anew at each access; changes to them are lost."""
        return unpack(self.blocks, self.kind, self.like.dtype)

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
        if self.in_eights:
            if x.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    "gradients need x as it is, and activations='int8' rounds it: load the model "
                    "without activations"
                )
            x = in_eights(x)
        rows = max(1, _PANEL // self.in_features)
        parts = [
            F.linear(
                x,
                unpack(self.blocks[first : first + rows], self.kind, x.dtype),
                None if bias is None else bias[first : first + rows],
            )
            for first in range(0, self.out_features, rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _natively(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product by native code, or None."""
        code = code_for_eights(x) if self.in_eights else code_for_blocks(x)
        if code is None or x.shape[-1] != self.in_features:
            return None
        weight = native_weight(self, x, bias)
        if weight is None:
            return None
        return code.product(as_rows(x), [weight], by_row=by_row.is_asked()).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, type={self.kind}"


class QuantizedLinear(QuantizedMatrix):
    """A linear module with a quantised weight, in place of an ``nn.Linear``.

    Args:
        blocks: As in ``QuantizedMatrix``.
        kind: Type of the blocks.
        bias: ``[out_features]`` or None; a parameter without a gradient.
    """

    bias: Tensor | None

    def __init__(self, blocks: Tensor, kind: BlockType, bias: Tensor | None = None) -> None:
        super().__init__(blocks, kind)
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
    """A table with quantised rows, in place of an ``nn.Embedding``."""

    def forward(self, ids: Tensor) -> Tensor:
        """``[...]`` whole numbers to ``[..., in_features]``."""
        return unpack(self.blocks[ids], self.kind, self.like.dtype)


def in_eights(x: Tensor) -> Tensor:
    """x rounded to 8 bits as products with blocks do it: 32 numbers share a scale, max |x| / 127.

    Args:
        x: ``[..., n]``, n a multiple of 32.

    Returns:
        The same shape and dtype, not finite in all 32 numbers of which one is not.
    """
    runs = x.float().reshape(*x.shape[:-1], -1, 32)
    most = runs.abs().amax(-1, keepdim=True)
    by = torch.where(most > 1e-30, 127 / most, torch.zeros_like(most))
    scale = torch.where(most.isfinite(), most / 127, torch.full_like(most, torch.nan))
    return ((runs * by).round() * scale).reshape(x.shape).to(x.dtype)


QUANTIZED_LINEAR = Exactly(QuantizedLinear)


def native_weight(matrix: QuantizedMatrix, x: Tensor, bias: Tensor | None) -> Weight | None:
    """The arguments of native code, or None if it cannot be used."""
    code, blocks = native.code(), matrix._buffers["blocks"]
    if (
        code is None
        or blocks is None
        or not blocks.is_contiguous()
        or not gate.is_plain(blocks)
        or not readable(code, matrix.kind)
        or (bias is not None and not native.is_plain(bias, x))
    ):
        return None
    return Weight(blocks, bias, matrix.kind.number + (IN_EIGHTS if matrix.in_eights else 0))


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
