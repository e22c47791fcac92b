"""How weights, queries and keys travel inside a page.

Weights, per layer (H heads, T queries, S keys)::

    [H, T, S] float32  ->  lower triangle if the layer is causal, else everything
                       ->  float16 if all layers together pass FLOAT32_BYTES (the page says so)
                       ->  little-endian bytes, row by row  ->  gzip  ->  base64  ->  <script>

Queries, keys and lse, per layer: q [H, T, D], k [G, S, D], lse [H, T] behind each other as float32.
"""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Weights: TypeAlias = npt.NDArray[np.floating[Any]]

FLOAT32_BYTES = 24_000_000
"""Weights that take more bytes than this as float32 are stored as float16."""

FLOAT16_BYTES = 64_000_000
"""Weights that take more bytes than this as float16 are refused: browsers cannot show them."""

VECTOR_BYTES = 12_000_000
"""Queries and keys that take more bytes than this are left out, and the page says so."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Queries, keys and lse of a layer.

    Attributes:
        q: float32 ``[H, T, D]`` as the scores used them.
        k: float32 ``[G, S, D]`` likewise.
        lse: float32 ``[H, T]``, −inf for a query that sees nothing.
        softcap: Softcap of the scores, or None.
    """

    q: npt.NDArray[np.float32]
    k: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    scale: float
    softcap: float | None

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return int(self.q.nbytes + self.k.nbytes + self.lse.nbytes)

    def packed(self) -> str:
        """All three as text."""
        parts = (self.q, self.k, self.lse)
        return packed(b"".join(np.ascontiguousarray(part, "<f4").tobytes() for part in parts))


@dataclass(frozen=True)
class Layout:
    """How weights are stored: which layers as their lower triangle, and as float16 or float32."""

    triangles: tuple[bool, ...]
    half: bool

    @classmethod
    def of(cls, weights: Sequence[Weights]) -> Layout:
        """The layout of weights ``[H, T, S]`` of each layer.

        Raises:
            ValueError: They are too many for a page.
        """
        triangles = tuple(
            layer.shape[1] == layer.shape[2] and not np.triu(layer, 1).any() for layer in weights
        )
        stored = [
            count_of(layer.shape, triangle)
            for layer, triangle in zip(weights, triangles, strict=True)
        ]
        values = sum(stored)
        if values * 2 > FLOAT16_BYTES:
            raise ValueError(_too_many(weights, all(triangles)))
        given = any(layer.dtype == np.float16 for layer in weights)
        return cls(triangles, half=values * 4 > FLOAT32_BYTES or given)

    def packed(self, layer: int, weights: Weights) -> str:
        """A layer's weights, head by head and row by row."""
        values = weights
        if self.triangles[layer]:
            rows, columns = np.tril_indices(weights.shape[-1])
            values = weights[:, rows, columns]
        return packed(values.astype("<f2" if self.half else "<f4").tobytes())


def count_of(shape: tuple[int, ...], triangle: bool) -> int:
    """Numbers that a layer of weights ``[H, T, S]`` takes."""
    heads, rows, columns = shape
    return heads * (rows * (rows + 1) // 2 if triangle else rows * columns)


def packed(content: bytes) -> str:
    """Bytes compressed as text for a page."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")


def _too_many(weights: Sequence[Weights], triangle: bool) -> str:
    heads = sum(layer.shape[0] for layer in weights)
    room = FLOAT16_BYTES // (2 * heads)
    most = (math.isqrt(8 * room + 1) - 1) // 2 if triangle else math.isqrt(room)
    return (
        f"too many tokens for a page: got {max(layer.shape[1] for layer in weights)}; "
        f"{len(weights)} layers with {heads} heads in all leave room for at most {most}; shorten "
        "the text, or pass fewer layers or heads"
    )
