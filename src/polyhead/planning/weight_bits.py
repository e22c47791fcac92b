"""Bits of weights: of one dtype, or as a model of codes holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polyhead.config import ParameterGroup
from polyhead.errors import ConfigError
from polyhead.families.common.quantization import KEY, Scheme

WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8, "int4": 4}
"""Bits of a weight; scales of quantized weights are not counted."""
FILE = "file"


def weight_bits(
    dtype: str, scheme: Scheme | None, held: Mapping[str, float] | None, ranks: int
) -> Callable[[ParameterGroup], float]:
    """The bits of each parameter of a piece.

    Args:
        dtype: One of ``WEIGHT_BITS``; or ``FILE``: as a loaded model holds its parts, and else
            products read codes, tables and heads have 16 bits, all else 32.
        scheme: How weights became codes, or None.
        held: Bits of the parameters of each part of a loaded model, or None.
        ranks: That share the model; 0: those of a mesh.

    Raises:
        ConfigError: ``FILE`` for a model whose weights are numbers, or for several ranks.
    """
    if dtype != FILE:
        return lambda piece: WEIGHT_BITS[dtype]
    if scheme is None and held is None:
        raise ConfigError(f"dtype={FILE!r} needs a config.json with {KEY}: this one has none")
    if ranks != 1:
        raise ConfigError(
            f"dtype={FILE!r} is of one rank: a mesh needs weights that are not quantized"
        )
    if held is not None:
        return lambda piece: held[piece.part]
    assert scheme is not None
    coded = scheme.held_bits

    def bits(piece: ParameterGroup) -> float:
        if piece.multiplied and not piece.as_numbers:
            return coded
        outside = piece.part in ("embedding", "head") and piece.units > 1 and piece.size > 1
        return 16.0 if outside else 32.0

    return bits
