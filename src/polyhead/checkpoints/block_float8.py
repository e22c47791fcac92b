"""Weights in 8-bit floats with a scale per block, as DeepSeek-V3 is published.

    weight[i, j] = code[i, j] · scale_inv[i // rows, j // columns]

DeepSeek-V3 (2024), §3.3.2: codes are float8 e4m3, blocks are 128 × 128, and ``weight_scale_inv``
stands beside ``weight`` in the file. Weights are widened to bfloat16, as DeepSeek's own conversion
does; activations are not quantised, which only faster kernels would need.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyhead.errors import CheckpointError

_SUFFIX = "_scale_inv"


def widened(
    tensors: Mapping[str, Tensor], blocks: tuple[int, int], where: object
) -> dict[str, Tensor]:
    """The tensors with every 8-bit weight multiplied by its scales, in bfloat16.

    Args:
        tensors: By the file's names.
        blocks: Rows and columns that share a scale; the last block of either may be smaller.
        where: The file or directory, for messages.

    Raises:
        CheckpointError: A scale is missing, or of another shape than the weight's blocks.
    """
    coded = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    wide = {
        name: tensor for name, tensor in tensors.items() if name.removesuffix(_SUFFIX) not in coded
    }
    for name in coded:
        scale = tensors.get(name + _SUFFIX)
        named = f"{where}: tensor {name + _SUFFIX!r}"
        wide[name] = _product(tensors[name], scale, blocks, named)
    return wide


def _product(codes: Tensor, scale: Tensor | None, blocks: tuple[int, int], named: str) -> Tensor:
    if scale is None:
        raise CheckpointError(f"{named} is missing: the weight has 8 bits")
    if codes.ndim != 2:
        raise CheckpointError(f"{named} belongs to a weight of shape {[*codes.shape]}, no matrix")
    counts = [-(-size // block) for size, block in zip(codes.shape, blocks, strict=True)]
    if [*scale.shape] != counts:
        raise CheckpointError(
            f"{named} must have shape {counts}, a number for each block of "
            f"{blocks[0]} × {blocks[1]}: got {[*scale.shape]}"
        )
    rows, columns = codes.shape
    each = scale.float().repeat_interleave(blocks[0], 0)[:rows]
    each = each.repeat_interleave(blocks[1], 1)[:, :columns]
    return (codes.float() * each).bfloat16()
