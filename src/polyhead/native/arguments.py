"""What native code is handed: tensors with what they mean, and the numbers that the module reads.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.native.coding import Coding

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_ROWS = 8
"""Rows of x that ``Code.product`` takes."""
MOST_WEIGHTS = 4
MOST_PIECES = 16
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu_tanh": 2}

Weight = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


class Piece(NamedTuple):
    """Keys ``[B, G, n, D]`` and values ``[B, G, n, V]``, last dimensions dense, other strides any.

    Attributes:
        k: Keys; in pages ``[pages, G, P, D]``.
        v: Values; in pages ``[pages, G, P, V]``.
        first: Position of the first; they count on from there unless ``positions`` is given.
        positions: ``[n]`` or ``[B, n]`` int64, dense, or None.
        pages: Where the tokens lie in pages: ``[B, m]`` int64, which page holds which P of them.
        skipped: Tokens of the first page that come before these.
        paged: How many tokens lie in pages.
        coding: What k and v stand for where they are codes of units of tokens; ``pages``,
            ``skipped`` and ``paged`` then count units.
    """

    k: Tensor
    v: Tensor
    first: int = 0
    positions: Tensor | None = None
    pages: Tensor | None = None
    skipped: int = 0
    paged: int = 0
    coding: Coding | None = None

    @property
    def unit(self) -> int:
        """Tokens in what k and v count: one, or a unit of codes."""
        return 1 if self.coding is None else self.coding.group

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1] if self.coding is None else self.coding.value_dim

    @property
    def length(self) -> int:
        return (self.k.shape[2] if self.pages is None else self.paged) * self.unit


@dataclass(frozen=True)
class Extras:
    """What joins the plain softmax(Q Kᵀ · scale) V.

    Attributes:
        softcap: c of c · tanh(score / c); 0 is none.
        bounds: ``[1 or B, T]`` int64 low and high: a query sees positions low ≤ p < high.
        keep: ``[1 or B, 1 or H, T, S]`` bool, keys dense, columns in the order of the pieces.
        q_positions: ``[1 or B, T]`` int64 of the queries, beside ``slopes`` and ``by_distance``.
        slopes: ``[H]`` float32 of ALiBi, dense, or None.
        by_distance: ``[H, 2 n + 1]`` float32, dense: what is added for keys n and more places
            behind the query, …, n and more ahead of it; or None.
        bias: ``[1 or B, 1 or H, 1 or T, 1 or S]`` float32, any strides, or None.
    """

    softcap: float = 0.0
    bounds: tuple[Tensor, Tensor] | None = None
    keep: Tensor | None = None
    q_positions: Tensor | None = None
    slopes: Tensor | None = None
    by_distance: Tensor | None = None
    bias: Tensor | None = None

    @property
    def learned(self) -> Tensor | None:
        """The bias of whatever kind: what a gradient may be asked for."""
        kinds = self.slopes, self.by_distance, self.bias
        return next((kind for kind in kinds if kind is not None), None)


NO_EXTRAS = Extras()

Factor = tuple[int, int, int]
"""Address of a weight ``[out, in]`` and of its bias or 0, and out; without gaps."""

Norm = tuple[int, float, float]
"""Address of the weight of an RMS norm, its eps and its offset."""


class LayerWeights(NamedTuple):
    """What a pre-norm layer computes with, in one dtype; address 0 where it has no such part."""

    attention_norm: Norm
    q: Factor
    k: Factor
    v: Factor
    q_norm: Norm
    k_norm: Norm
    out: Factor
    attention_out_norm: Norm
    feed_forward_norm: Norm
    gate: Factor
    up: Factor
    down: Factor
    feed_forward_out_norm: Norm


class Heads(NamedTuple):
    """The attention of one token: H heads over G kv heads of D and V features.

    Attributes:
        rotation: cos and sin ``[D]`` of the token's position, as ``Code.rotate`` takes them.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float
    rotation: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class TileSums:
    """Sums over the rows ``[B, T]`` and columns ``[B, S]`` of attention weights; None: not wanted.

    All but ``received`` have one batch stride, and rows without gaps.

    Attributes:
        entropy: −Σ p log p.
        squares: Σ p².
        largest: The largest weight and the int64 index of its key.
        top: The largest weights ``[B, T, k]`` in order and the int64 indexes of their keys.
        received: Σ p over the rows.
    """

    entropy: Tensor | None = None
    squares: Tensor | None = None
    largest: tuple[Tensor, Tensor] | None = None
    top: tuple[Tensor, Tensor] | None = None
    received: Tensor | None = None


def attention_numbers(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    extras: Extras,
    out: Tensor,
    lse: Tensor | None,
) -> list[float]:
    """The numbers that describe an attention to the module."""
    B, H, T, D = q.shape
    arguments = [
        DTYPES[q.dtype], B, H, pieces[0].k.shape[1], T, D, out.shape[-1], scale, extras.softcap,
        q.data_ptr(), *q.stride()[:3], out.data_ptr(), *out.stride()[:3],
        0 if lse is None else lse.data_ptr(),
    ]  # fmt: skip
    arguments += _NONE if extras is NO_EXTRAS else _extras(extras)
    for piece in pieces:
        k, v, positions = piece.k, piece.v, piece.positions
        arguments += k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3]
        if piece.pages is None:
            arguments += _IN_ONE_PIECE
        else:
            unit = piece.unit
            arguments += *table(piece.pages), k.shape[2] * unit, piece.skipped * unit
        arguments += piece.length, piece.first, *table(positions)
        if piece.coding is None:
            arguments.append(0)
        else:
            arguments += piece.coding.numbers(k, v)
    return arguments


def addresses(weight: Weight) -> tuple[int, int]:
    return weight[0].data_ptr(), 0 if weight[1] is None else weight[1].data_ptr()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_NONE = [0] * 17
_IN_ONE_PIECE = [0] * 4


def _extras(extras: Extras) -> list[int]:
    found = [0, 0, 0] if extras.bounds is None else [
        extras.bounds[0].data_ptr(), *table(extras.bounds[1])
    ]  # fmt: skip
    found += strided(extras.keep, 3)
    found.append(0 if extras.slopes is None else extras.slopes.data_ptr())
    if extras.by_distance is None:
        found += [0, 0]
    else:
        found += [extras.by_distance.data_ptr(), extras.by_distance.shape[1] // 2]
    return [*found, *table(extras.q_positions), *strided(extras.bias, 4)]


def of_heads(x: Tensor) -> Tensor:
    """``[H]`` or ``[H, n]`` as ``[1, H, 1, 1]`` or ``[1, H, 1, n]``."""
    return x.view(1, len(x), 1, -1)


def table(rows: Tensor | None) -> tuple[int, int]:
    """Address and batch stride of ``[n]``, ``[1, n]`` or ``[B, n]``."""
    if rows is None:
        return 0, 0
    return rows.data_ptr(), rows.stride(0) if rows.ndim == 2 and len(rows) > 1 else 0


def strided(tensor: Tensor | None, dimensions: int) -> list[int]:
    """Address and strides, 0 along dimensions that broadcast."""
    if tensor is None:
        return [0] * (dimensions + 1)
    sizes = zip(tensor.shape[:dimensions], tensor.stride()[:dimensions], strict=True)
    return [tensor.data_ptr(), *(0 if size == 1 else stride for size, stride in sizes)]
