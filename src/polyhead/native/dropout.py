"""Which weights dropout keeps: a hash that csrc/attention/scores.h and torch both compute."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Dropout(NamedTuple):
    """A share p of the weights is 0, the others are multiplied with 1 / (1 − p).

    Attributes:
        p: Above 0 and below 1.
        seed: ``[1]`` int64.
        query: Place of the first query.
        key: Place of the first key; others count on from there.
    """

    p: float
    seed: Tensor
    query: int
    key: int


def kept(
    p: float,
    seed: Tensor,
    heads: tuple[int, int],
    queries: Tensor,
    keys: Tensor,
    *,
    all_heads: int | None = None,
) -> Tensor:
    """Which weights are kept, ``[B, H, T, S]``, True with probability 1 − p.

    A counter-based hash of (seed, batch row, head, query place, key place): the same weights are
    dropped whatever the tiling or kernel, forward and backward, with nothing stored.

    Args:
        p: Share that is dropped.
        seed: A whole number.
        heads: B and H.
        queries: ``[T]`` places, on the device of the seed.
        keys: ``[S]`` places.
        all_heads: How many heads a batch row has, where these are a part of them; default H.
    """
    B, H = heads
    first = torch.arange(B, device=seed.device) * (H if all_heads is None else all_heads)
    rows = (first[:, None] + torch.arange(H, device=seed.device)).view(B, H, 1, 1)
    key = _mix(_mix(_mix(seed + rows) + queries[:, None]) + keys)
    return (key & 0xFFFFFF).to(torch.float32) / float(1 << 24) >= p


def _mix(x: Tensor) -> Tensor:
    """A 32-bit avalanche (Mueller's integer hash) in int64 arithmetic."""
    x = x & 0xFFFFFFFF
    x = (((x >> 16) ^ x) * 0x45D9F3B) & 0xFFFFFFFF
    x = (((x >> 16) ^ x) * 0x45D9F3B) & 0xFFFFFFFF
    return (x >> 16) ^ x
