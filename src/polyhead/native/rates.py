"""What the processor does at most: chains of one instruction in registers, and plain reads.

Benchmarks say how much of that a call reaches. Each rate is measured when it is asked for, with as
many threads as torch uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.native import tensor_check
from polyhead.native.threads import threads

_PER_ROUND = 192
"""Operations of a thread with the narrowest instruction; others do up to eight times as many."""
_PER_ROUND_OF_TILES = 128 * _PER_ROUND
"""The same of matrix tiles, which do eight times as many, or sixteen of 8-bit integers."""

_OF_DTYPE = {
    torch.float32: ("fma_256", "fma_512", "fp32_tiles"),
    torch.bfloat16: ("fma_256", "fma_512", "bf16_pairs", "bf16_tiles"),
    torch.float16: ("fma_256", "fma_512", "fp16_tiles"),
    torch.int8: ("int8_quads", "int8_tiles"),
}
_SLICED = {"fp16_tiles": 4, "fp32_tiles": 6}
"""Products of bfloat16 on matrix tiles that one of a dtype takes (``csrc/common/slices.h``)."""


def instructions(dtype: torch.dtype) -> list[str]:
    """Those that multiply numbers of a dtype here, widened to float32 or as they are.

    ``"fma_256"`` and ``"fma_512"`` multiply and add float32, ``"bf16_pairs"`` adds two products of
    bfloat16 at once, ``"bf16_tiles"`` multiplies matrix tiles of them (AMX), ``"fp16_tiles"`` and
    ``"fp32_tiles"`` tiles of the two or three bfloat16 that float16 and float32 are sums of,
    ``"int8_quads"`` adds four products of 8-bit integers, ``"int8_tiles"`` multiplies matrix tiles
    of them. Empty without native code.
    """
    found = [] if tensor_check.MODULE is None else tensor_check.MODULE.rates()
    return [name for name in _OF_DTYPE.get(dtype, ()) if _native(name) in found]


def _native(instruction: str) -> str:
    return "bf16_tiles" if instruction in _SLICED else instruction


def compute(instruction: str, operations: float) -> float:
    """Does so many operations in registers, all threads together, or up to sixteen times as many.

    Args:
        instruction: One of ``instructions``.
        operations: A product and a sum are two.

    Returns:
        How many were done.
    """
    assert tensor_check.MODULE is not None
    team, products = threads(), _SLICED.get(instruction, 1)
    each = _PER_ROUND_OF_TILES / products if instruction.endswith("_tiles") else _PER_ROUND
    rounds = math.ceil(operations / (team * each))
    done: float = tensor_check.MODULE.at_rate(_native(instruction), team, rounds)
    return done / products


def reader(size: int) -> Callable[[], None] | None:
    """A function that reads about ``size`` bytes once; None: native code cannot here."""
    if tensor_check.MODULE is None:
        return None
    memory: Tensor = torch.ones(max(1, size // 512) * 512, dtype=torch.uint8, device="cpu")
    native = tensor_check.MODULE
    if not native.read_all(memory, 1, 1):
        return None
    return lambda: native.read_all(memory, threads(), 1) and None
