"""Blocks of random codes, with scales of the size that weights have."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from polyhead.quantization import BlockType

# Where a block has its scales, in 16 bits.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "TQ2_0": (64,), "TQ1_0": (52,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
}  # fmt: skip


def random_blocks(kind: BlockType, rows: int, numbers: int, seed: int = 0) -> Tensor:
    """``[rows, bytes of a row]`` uint8."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, numbers // kind.numbers, kind.octets), dtype=np.uint8)
    for at in _HALVES.get(kind.name, ()):
        scales = random.uniform(-0.01, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = random.integers(116, 124, blocks.shape[:2])
    if kind.name == "IQ1_M":  # four bits of the scale in each of four places: 2⁻⁷ to 2⁻³
        blocks[..., 55] = blocks[..., 55] & 15 | 0x20
    return torch.from_numpy(blocks.reshape(rows, -1))


def blocks_of(byte: int, kind: BlockType, rows: int, numbers: int) -> Tensor:
    """Random scales, and everything else of a byte: extreme codes."""
    blocks = random_blocks(kind, rows, numbers).view(rows, -1, kind.octets)
    full = torch.full_like(blocks, byte)
    scales = {"MXFP4": [0], "IQ1_M": [49, 51, 53, 55]}.get(
        kind.name, [at + i for at in _HALVES.get(kind.name, ()) for i in (0, 1)]
    )
    full[..., scales] = blocks[..., scales]
    return full.flatten(1)


def by_package(blocks: Tensor, kind: BlockType) -> Tensor:
    """The numbers as the gguf package unpacks them, float32."""
    numbers = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(numbers))
