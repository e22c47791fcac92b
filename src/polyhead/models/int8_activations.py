"""Activations in 8 bits: what multiplies weights in blocks is rounded.

    x_k ≈ s q_k        s = max |x| / 127 of 32 numbers that lie next to each other, q in -127 … 127

Every row of x has its own scales, so a row gets the same bits beside others and alone. llama.cpp
always computes like this; here it is an option (``load(activations="int8")``), because logits are
no longer those of the unpacked weights. Elsewhere it is called dynamic quantization of activations.
"""

from __future__ import annotations

from torch import nn

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.layers.quantized import QuantizedEmbedding, QuantizedMatrix
from polyhead.native.arguments import MAX_INT8_INPUTS
from polyhead.native.code import Code
from polyhead.quantization.blocks import BlockType, block_types
from polyhead.quantization.scaled import BF16, F16, I8, U4, U8


def rounding_types(code: Code) -> list[BlockType]:
    """Types of blocks whose products take x in 8 bits: those with whole numbers for codes."""
    kinds = *block_types().values(), I8, U8, U4
    return [kind for kind in kinds if kind.number in code.block_sizes]


def round_activations(model: nn.Module) -> None:
    """From now on products with weights in blocks round what they multiply to 8 bits.

    Linear modules whose weights are numbers, attention and norms compute as before, and so
    does a table of embeddings of a type that cannot, also where it makes the logits.

    Args:
        model: Changed in place.

    Raises:
        UnsupportedError: no weight is in blocks, one is not of ``rounding_types`` or reads more
            than 32,768 features, or there is no native code here. The model is unchanged.
    """
    found = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, QuantizedMatrix) and part.kind not in (F16, BF16)
    }
    if not found:
        raise UnsupportedError(
            "activations='int8' needs weights in blocks, and this model has none: load a quantized "
            "GGUF file on a CPU without a dtype, or with quantize='Q8_0'"
        )
    code = native.code()
    if code is None:
        raise UnsupportedError("activations='int8' needs native code, which is unavailable")
    types, multiplied = rounding_types(code), []
    for name, part in found.items():
        carried = part.kind in types and part.in_features <= MAX_INT8_INPUTS
        if not carried and not isinstance(part, QuantizedEmbedding):
            raise UnsupportedError(
                f"activations='int8' takes blocks of type {', '.join(map(str, types))} that read "
                f"at most {MAX_INT8_INPUTS:,} features: {name} is {part.kind} and reads "
                f"{part.in_features:,}"
            )
        if carried:
            multiplied.append(part)
    for part in multiplied:
        part.int8_activations = True
