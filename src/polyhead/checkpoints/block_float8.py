"""Weights in 8-bit floats with a scale per block, as DeepSeek-V3 is published.

    weight[i, j] = code[i, j] · scale_inv[i // rows, j // columns]

DeepSeek-V3 (2024), §3.3.2: codes are float8 e4m3, blocks are 128 × 128, and ``weight_scale_inv``
stands beside ``weight`` in the file. Weights are widened to bfloat16, as DeepSeek's own conversion
does; activations are not quantised here, which the files ask of faster kernels only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints.keys import Keys
from polyhead.errors import CheckpointError, ConfigError

KEY = "quantization_config"
_SUFFIX = "_scale_inv"
_HARMLESS = ("activation_scheme", "modules_to_not_convert")


def read_blocks(values: Mapping[str, Any], where: object) -> tuple[int, int] | None:
    """Rows and columns of a block, as config.json's ``quantization_config`` says; None: no blocks.

    Args:
        values: The object of config.json.
        where: The file, for messages.

    Raises:
        ConfigError: Another quantisation than this one, by the field.
    """
    scheme = values.get(KEY)
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"{where}: {KEY} must be an object: got {scheme!r}")
    keys = Keys(scheme, f"{where}: {KEY}")
    if (method := keys.take("quant_method")) != "fp8":
        raise keys.refused("quant_method", method, "'fp8'")
    keys.expect("fmt", "e4m3")
    size = keys.take("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(_is_count(n) for n in size)):
        raise keys.refused("weight_block_size", size, "[rows, columns], such as [128, 128]")
    keys.finish(_HARMLESS)
    return size[0], size[1]


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


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
