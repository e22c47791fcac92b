"""Blocks as directories of Hugging Face hold weights: codes here, their scales in another tensor.

    number[n, k] = (code[n, k] - zero[i, j]) · scale[i, j]      i = n // rows, j = k // numbers

DeepSeek's 8-bit floats share a scale by squares of 128 × 128, GPTQ, AWQ and compressed-tensors have
whole numbers of 4 or 8 bits with a scale for a run of a row or for all of it. Tables and heads that
stay numbers of 16 bits beside them are blocks without scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.native.arguments import Scales
from polyhead.quantization.blocks import BlockType

F16, BF16 = BlockType("F16", 1, 32, 64), BlockType("BF16", 30, 32, 64)
F8_E4M3 = BlockType("F8_E4M3", 64, 32, 32)
I8, U8 = BlockType("I8", 65, 32, 32), BlockType("U8", 66, 32, 32)
U4 = BlockType("U4", 67, 32, 16)
"""Two codes that lie next to each other share a byte, the first in its low half."""

TYPES = {kind.name: kind for kind in (F16, BF16, F8_E4M3, I8, U8, U4)}
_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_MIDDLES = {"U8": 128, "U4": 8}


def is_scaled(kind: BlockType) -> bool:
    """Whether the scales of a type lie in another tensor."""
    return kind.name in TYPES and kind not in (F16, BF16)


def numbers_of(
    blocks: Tensor, kind: BlockType, scales: Scales | None, order: Tensor | None = None
) -> Tensor:
    """The numbers of ``[rows, bytes of a row]``, float32, with torch's operations.

    Args:
        blocks: uint8 ``[rows, bytes of a row]``.
        order: The group of every number of a row, where they do not lie next to each other.
    """
    found = codes_of(blocks, kind).float()
    if scales is None:
        return found
    rows = torch.arange(found.shape[0], device=blocks.device) // scales.rows
    if order is None:
        order = torch.arange(found.shape[1], device=blocks.device) // scales.numbers
    zeros = _zeros(scales, kind)[rows][:, order]
    return (found - zeros) * scales.scales.float()[rows][:, order]


def codes_of(blocks: Tensor, kind: BlockType) -> Tensor:
    """The codes of ``[rows, bytes of a row]`` in a dtype of their own."""
    if kind == U4:
        return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return blocks.contiguous().view(_DTYPES[kind.name])


def of_rows(scales: Scales, rows: Tensor) -> Scales:
    """Those of some rows of the weight, which then have their own."""
    groups = rows // scales.rows
    zeros = None if scales.zeros is None else scales.zeros[groups]
    return Scales(scales.scales[groups], zeros, scales.numbers, 1)


def _zeros(scales: Scales, kind: BlockType) -> Tensor:
    if scales.zeros is None:
        return torch.full_like(scales.scales, _MIDDLES.get(kind.name, 0), dtype=torch.float32)
    return (scales.zeros.view(torch.int8) if kind == I8 else scales.zeros).float()
