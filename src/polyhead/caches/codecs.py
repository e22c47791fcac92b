"""How tokens become the fields of a store, and come back: as they are, as latents, in 8 or 4 bits.

A *stream* is what a cache is given: keys ``[B, G, n, D]``, values ``[B, G, n, V]`` and, where they
are stored, positions ``[B, 1, n, 1]``. A codec turns n tokens into units and units into tokens.

Asymmetric quantization of a group of numbers x to codes 0 … 2^bits − 1:

    zero ≤ min x          scale ≥ (max x − zero) / (2^bits − 1)          both rounded outward
    code = round((x − zero) / scale)                                     x' = zero + code · scale

so |x − x'| ≤ scale / 2, however coarsely scale and zero are stored, plus the rounding of x' to the
dtype of the cache. A group with a number that is not finite comes back as NaN: never as a number.

Shape letters: B batch, G kv heads, n tokens, u units, g tokens in a unit, D key size, V value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.caches.sizes import SCALE_DTYPE, Quantized, value_group
from polyhead.native.coding import Coding


class KVChunk(NamedTuple):
    """Tokens outside of any store; ``v`` None: the value is part of the key (a latent)."""

    k: Tensor
    v: Tensor | None
    positions: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def of(self, tensors: list[Tensor]) -> KVChunk:
        """The same kind of stream made of other tensors."""
        rest = iter(tensors)
        return KVChunk(*(None if x is None else next(rest) for x in self))  # type: ignore[arg-type]

    def part(self, start: int, stop: int) -> KVChunk:
        return self.of([x[:, :, start:stop] for x in self.tensors()])


class Exact:
    """A unit is a token, a field is a tensor of the stream.

    Args:
        value_dim: V of a latent, whose value is the first V columns of its key; None: there is v.
    """

    tokens = 1

    def __init__(self, value_dim: int | None = None) -> None:
        self.value_dim = value_dim

    def encode(self, stream: KVChunk) -> list[Tensor]:
        return stream.tensors()

    def decode(self, records: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The fields as keys and values."""
        k = records[0]
        return k, records[1] if self.value_dim is None else k[..., : self.value_dim]

    def as_views(self, records: list[Tensor]) -> tuple[Tensor, Tensor, None]:
        """A strip's arguments from fields: keys and values."""
        return *self.decode(records), None

    def positions(self, records: list[Tensor]) -> Tensor:
        """Positions ``[B, n]`` from the last field, if they are stored."""
        return records[-1][:, 0, :, 0]


class Codes:
    """A unit is ``group`` tokens in 8 or 4 bits.

    Args:
        storage: Bits and group.
        key_dim: Key size D of a head.
        value_dim: Value size V of a head.
        dtype: Dtype of the tokens that come back.
    """

    def __init__(
        self, storage: Quantized, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        self.storage, self.dtype, self.tokens = storage, dtype, storage.group
        self.key_dim, self.value_dim = key_dim, value_dim
        self.value_group = value_group(value_dim, storage.group)

    def encode(self, stream: KVChunk) -> list[Tensor]:
        """Units of n tokens, n a multiple of the group."""
        k = _split(stream.k, 2, (-1, self.tokens))
        records = [*_quantized(k, self.storage.k_bits, axis=3)]
        if stream.v is not None:
            v = _split(_split(stream.v, 3, (-1, self.value_group)), 2, (-1, self.tokens))
            records += _quantized(v, self.storage.v_bits, axis=5)
        records = [record.flatten(3) for record in records]
        if stream.positions is not None:
            records.append(_split(stream.positions.squeeze(-1), 2, (-1, self.tokens)))
        return records

    def decode(self, records: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys ``[B, G, u · g, D]`` and values ``[B, G, u · g, V]``."""
        codes, scale, zero = records[:3]
        codes = _unpacked(_split(codes, 3, (-1, self.key_dim)), self.storage.k_bits)
        k = _numbers(codes, scale[:, :, :, None], zero[:, :, :, None], self.dtype).flatten(2, 3)
        if self.storage.latent is not None:
            return k, k[..., : self.value_dim]
        codes, scale, zero = records[3:6]
        shape = (-1, self.value_dim // self.value_group, self.value_group)
        codes = _unpacked(_split(codes, 3, shape), self.storage.v_bits)
        scale, zero = (_split(x, 3, (self.tokens, -1))[..., None] for x in (scale, zero))
        return k, _numbers(codes, scale, zero, self.dtype).flatten(2, 3).flatten(3)

    def as_views(self, records: list[Tensor]) -> tuple[Tensor, Tensor, Coding]:
        """A strip's arguments from fields: codes of keys and values, with scales and zeros."""
        latent = self.storage.latent is not None
        k, *key_scales = records[:3]
        v, *value_scales = (k, None, None) if latent else records[3:6]
        v_bits = 0 if latent else self.storage.v_bits
        sizes = self.tokens, self.key_dim, self.value_dim
        bits = self.storage.k_bits, v_bits
        return k, v, Coding(*sizes, *bits, self.value_group, *key_scales, *value_scales)

    def positions(self, records: list[Tensor]) -> Tensor:
        return records[-1][:, 0].flatten(1)


Codec = Exact | Codes


def _split(x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """Splits one axis into several."""
    return x.unflatten(axis, sizes)  # type: ignore[no-untyped-call, no-any-return]


def _quantized(x: Tensor, bits: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, packed along axis 3 (tokens), with the scale and zero of every group along ``axis``.

    Args:
        x: ``[B, G, u, g, ...]``.
        bits: 8 or 4.
        axis: The numbers that share a scale.
    """
    x = x.float()
    top = (1 << bits) - 1
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    zero = _rounded_down(low)
    scale = -_rounded_down((zero.float() - high) / top)
    steps = (x - zero.float()) / scale.float().where(scale > 0, 1.0)
    codes = steps.nan_to_num(0.0).round_().clamp_max_(top).to(torch.uint8)
    if bits == 4:
        first, second = codes.chunk(2, dim=3)
        codes = first | (second << 4)
    return codes, scale.squeeze(axis), zero.squeeze(axis)


def _rounded_down(x: Tensor) -> Tensor:
    """The greatest number of the scales' dtype that is not above ``x``."""
    near = x.to(SCALE_DTYPE)
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    return torch.where(near.float() > x, below, near)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    """``[B, G, u, g, ...]`` codes, one in each number."""
    return codes if bits == 8 else torch.cat((codes & 15, codes >> 4), dim=3)


def _numbers(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.addcmul(zero.float(), codes.float(), scale.float()).to(dtype)
