"""Keys and values in 8 or 4 bits, as the compiled code reads them where they lie.

Shape letters: B batch, G kv heads, u units, D key size, V value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Coding(NamedTuple):
    """What codes stand for that lie in units of ``group`` tokens.

    A code c is the number zero + scale · c. Keys have a scale for each of D channels of a unit,
    values one for ``value_group`` channels of a token. In 4 bits a byte holds the codes of a token
    of the first half of its unit (low) and of the token half a unit later (high). Scales and zeros
    are bfloat16; in pages, pages take the place of B.

    Attributes:
        group: Tokens in a unit; even.
        key_dim: Key size D of a head.
        value_dim: Value size V of a head.
        k_bits: 8 or 4.
        v_bits: 8 or 4; 0: the value is the first V columns of the key.
        value_group: Channels of a value that share a scale; V is a multiple of it.
        k_scale: ``[B, G, u, D]``.
        k_zero: Likewise, with the strides of ``k_scale``.
        v_scale: ``[B, G, u, group · V / value_group]``; None: the value is part of the key.
        v_zero: Likewise, with the strides of ``v_scale``.
    """

    group: int
    key_dim: int
    value_dim: int
    k_bits: int
    v_bits: int
    value_group: int
    k_scale: Tensor
    k_zero: Tensor
    v_scale: Tensor | None
    v_zero: Tensor | None

    def check(self, k: Tensor, v: Tensor) -> None:
        """Compares the sizes of codes and scales.

        Args:
            k: Codes ``[B, G, u, group · D · k_bits / 8]`` uint8, last dimension dense.
            v: Codes ``[B, G, u, group · V · v_bits / 8]``; not looked at where they are those of k.

        Raises:
            ValueError: Codes or scales that are not as large as this says.
        """
        D, V = self.key_dim, self.value_dim
        if self.group < 2 or self.group % 2 or self.value_group < 1 or V % self.value_group:
            raise ValueError(
                f"group must be even and value_group divide V={V}: got {self.group} and "
                f"{self.value_group}"
            )
        _check_scales("k", k, (self.k_scale, self.k_zero), (self.group * D, self.k_bits), D)
        if self.v_scale is None or self.v_zero is None:
            if self.v_bits or V > D:
                raise ValueError(f"v needs scales: got v_bits={self.v_bits}, V={V} and D={D}")
            return
        scales = self.group * (V // self.value_group)
        pair = self.v_scale, self.v_zero
        _check_scales("v", v, pair, (self.group * V, self.v_bits), scales)
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"k and v must have as many units: got {[*k.shape]}, {[*v.shape]}")


def _check_scales(
    name: str, codes: Tensor, pair: tuple[Tensor, Tensor], unit: tuple[int, int], width: int
) -> None:
    """Raises ValueError unless scale and zero are as large as the codes say.

    Args:
        name: Name of the codes.
        codes: ``[B, G, u, bytes]``.
        pair: Scale and zero.
        unit: Codes in a unit, and bits of each.
        width: Scales in a unit.
    """
    scale, _ = pair
    count, bits = unit
    if bits not in (4, 8) or codes.dtype != torch.uint8 or codes.shape[3] * 8 != count * bits:
        raise ValueError(
            f"{name} must be uint8 of {count} codes of 8 or 4 bits in a unit: got {codes.dtype} "
            f"{[*codes.shape]} and {bits} bits"
        )
    for x in pair:
        if (
            x.dtype != torch.bfloat16
            or x.shape != (*codes.shape[:3], width)
            or x.stride() != scale.stride()
            or x.stride(3) != 1
        ):
            raise ValueError(
                f"scale and zero of {name} must be bfloat16 {[*codes.shape[:3], width]}, dense and "
                f"alike: got {x.dtype} {[*x.shape]} with strides {x.stride()}"
            )
