"""Queries, codes and the expected attention, for the first-use test of native code.

Shape letters: B batch, H query heads, G kv heads, T queries, u units, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.native.coding import Coding


class CodedSample(NamedTuple):
    """Queries ``[1, 4, T, D]``, codes of five units of two kv heads, and what they stand for."""

    q: Tensor
    k: Tensor
    v: Tensor
    coding: Coding

    def exact(self, scale: float) -> Tensor:
        """softmax(Q Kᵀ · scale) V in float64 of the numbers that the codes stand for."""
        k, v = self.decoded()
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        return (self.q.double() @ k.mT * scale).softmax(dim=-1) @ v

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Keys ``[1, 2, u · group, D]`` and values ``[1, 2, u · group, V]``, float64."""
        coding = self.coding
        assert coding.v_scale is not None
        assert coding.v_zero is not None
        k = _rows(self.k, coding.k_bits, coding.key_dim)
        k = k * coding.k_scale.double()[:, :, :, None] + coding.k_zero.double()[:, :, :, None]
        v = _rows(self.v, coding.v_bits, coding.value_dim)
        shape = (*v.shape[:4], -1, coding.value_group)
        scale, zero = (x.double().reshape(*shape[:5], 1) for x in (coding.v_scale, coding.v_zero))
        v = (v.reshape(shape) * scale + zero).flatten(4)
        return k.flatten(2, 3), v.flatten(2, 3)


def samples(dtype: torch.dtype) -> Iterator[CodedSample]:
    """Codes of 8 and of 4 bits, for few queries and for many, which are of this dtype."""
    generator = torch.Generator().manual_seed(0)

    def scales(width: int, bits: int) -> tuple[Tensor, Tensor]:
        scale, zero = torch.rand(
            2, 1, 2, 5, width, generator=generator, dtype=torch.float32, device="cpu"
        ).bfloat16()
        return scale * 2**-bits, zero - 1

    def codes(size: int, bits: int) -> Tensor:
        shape = (1, 2, 5, 32 * size * bits // 8)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8, device="cpu")

    for bits in (8, 4):
        # The value's 64 columns have two scales for a token.
        pairs = *scales(48, bits), *scales(32 * 2, bits)
        coding = Coding(32, 48, 64, bits, bits, 32, *pairs)
        for queries in (1, 40):
            q = torch.randn(
                1, 4, queries, 48, generator=generator, dtype=torch.float32, device="cpu"
            ).to(dtype)
            yield CodedSample(q, codes(48, bits), codes(64, bits), coding)


def _rows(codes: Tensor, bits: int, size: int) -> Tensor:
    """``[B, G, u, group, size]`` codes, one in each number."""
    rows = codes.reshape(*codes.shape[:3], -1, size)
    return (rows if bits == 8 else torch.cat((rows & 15, rows >> 4), dim=3)).double()
