"""Calls the compiled code of one instruction set with addresses.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import ModuleType

import torch
from torch import Tensor

from polyhead.native.arguments import (
    ACTIVATIONS,
    DTYPES,
    NO_EXTRAS,
    Extras,
    Heads,
    LayerWeights,
    Piece,
    TileSums,
    Weight,
    address,
    addresses,
    attention_numbers,
    of_heads,
    strided,
    table,
)


class Code:
    """One instruction set's code. Callers have checked dtypes, shapes and strides."""

    def __init__(self, module: ModuleType, index: int, name: str) -> None:
        self.name = name
        self._index = index
        self._product, self._attend = module.product, module.attend
        self._feed_forward, self._norm = module.feed_forward, module.norm
        self._rotate, self._gradients = module.rotate, module.gradients
        self._tile_sums, self._step = module.tile_sums, module.step

    def product(self, x: Tensor, weights: Sequence[Weight]) -> Tensor:
        """``[x W0ᵀ + b0 | x W1ᵀ + b1 | …]``, added up in float32.

        Args:
            x: ``[rows, in]``, at most ``MOST_ROWS`` rows, the last dimension dense.
            weights: At most ``MOST_WEIGHTS`` of ``[out, in]`` and ``[out]`` or None, dense, in the
                dtype of x.
        """
        rows, inputs = x.shape
        y = x.new_empty(rows, sum(weight.shape[0] for weight, _ in weights))
        arguments = [
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.data_ptr(), x.stride(0),
            rows, inputs, y.data_ptr(), y.shape[1],
        ]  # fmt: skip
        for weight in weights:
            arguments += *addresses(weight), weight[0].shape[0]
        self._product(*arguments)
        return y

    def feed_forward(
        self, x: Tensor, gate: Weight | None, up: Weight, down: Weight, activation: str
    ) -> Tensor:
        """``down(activation(gate(x)) · up(x))``, or without a gate ``down(activation(up(x)))``.

        Args:
            x: ``[rows, E]``, at most ``MOST_ROWS`` rows, the last dimension dense.
            gate: ``[F, E]`` and ``[F]`` or None, dense, in the dtype of x, as the others.
            up: ``[F, E]`` and ``[F]`` or None.
            down: ``[E, F]`` and ``[E]`` or None.
            activation: One of ``ACTIVATIONS``.
        """
        y = x.new_empty(x.shape[0], down[0].shape[0])
        self._feed_forward(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], ACTIVATIONS[activation],
            x.data_ptr(), x.stride(0), *x.shape, y.data_ptr(),
            *((0, 0) if gate is None else addresses(gate)),
            *addresses(up), up[0].shape[0], *addresses(down), down[0].shape[0],
        )  # fmt: skip
        return y

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``x / √(mean(x²) + eps) · (weight + offset)`` along the rows of ``[rows, E]``."""
        y = x.new_empty(x.shape)
        self._norm(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.data_ptr(), x.stride(0),
            *x.shape, weight.data_ptr(), eps, offset, y.data_ptr(),
        )  # fmt: skip
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x · cos + roll(x, D / 2) · sin`` of every head, a new dense tensor.

        Args:
            x: ``[B, T, N, D]``, the last dimension dense, other strides any.
            cos: ``T · D`` numbers, dense, in the dtype of x.
            sin: Likewise, the first half of D negative.
        """
        y = x.new_empty(x.shape)
        self._rotate(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.data_ptr(), *x.shape,
            *x.stride()[:3], cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def attend(
        self,
        q: Tensor,
        pieces: Sequence[Piece],
        scale: float,
        extras: Extras = NO_EXTRAS,
        *,
        lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``q [B, H, T, D]`` over all pieces: out and, if asked for, lse.

        Args:
            q: The last dimension dense, other strides any.
            pieces: One to ``MOST_PIECES``.
            scale: Factor of the scores.
            extras: Mask, bias, softcap.
            lse: Whether to return ``[B, H, T]`` float32.
        """
        out = q.new_empty(*q.shape[:3], pieces[0].value_dim)
        found = q.new_empty(q.shape[:3], dtype=torch.float32) if lse else None
        arguments = attention_numbers(q, pieces, scale, extras, out, found)
        self._attend(self._index, torch.get_num_threads(), *arguments)
        return out, found

    def gradients(
        self,
        q: Tensor,
        piece: Piece,
        scale: float,
        extras: Extras,
        result: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        *,
        of_bias: bool = False,
    ) -> list[Tensor]:
        """Gradients of q, k and v, dense, and of the bias in float32 if asked for.

        Args:
            q: As ``attend`` got it, and so the next three.
            piece: The keys and values, in one piece.
            scale: Factor of the scores.
            extras: Mask, bias, softcap.
            result: out and lse, as ``attend`` gave them.
            grads: Of out, the last dimension dense, and of lse ``[B, H, T]`` float32, dense.
            of_bias: Whether to return the gradient of ``extras.learned`` too.
        """
        grad_out, grad_lse = grads
        found = [q.new_empty(x.shape) for x in (q, piece.k, piece.v)]
        strides = [0] * 5
        if of_bias and extras.learned is not None:
            found.append(torch.zeros(extras.learned.shape))
            strides = strided(found[3] if extras.bias is not None else of_heads(found[3]), 4)
        self._gradients(
            self._index, torch.get_num_threads(), grad_out.data_ptr(), *grad_out.stride()[:3],
            grad_lse.data_ptr(), *(x.data_ptr() for x in found[:3]), *strides,
            *attention_numbers(q, [piece], scale, extras, *result),
        )  # fmt: skip
        return found

    def step(
        self,
        x: Tensor,
        weights: LayerWeights,
        heads: Heads,
        held: tuple[Tensor, Tensor],
        activation: str,
    ) -> Tensor:
        """One token of every batch row behind a whole layer.

        Args:
            x: ``[B, 1, E]``, at most ``MOST_ROWS`` rows, dense.
            weights: Of the layer, in the dtype of x.
            heads: Of its attention.
            held: Keys ``[B, G, S, D]`` and values ``[B, G, S, V]``, last dimensions dense; those of
                the last token are written here.
            activation: One of ``ACTIVATIONS``.
        """
        y, (k, v) = x.new_empty(x.shape), held
        cos, sin = heads.rotation or (None, None)
        self._step(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.shape[0], x.shape[2],
            *heads[:6], ACTIVATIONS[activation], x.data_ptr(), y.data_ptr(), address(cos),
            address(sin), k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3], k.shape[2],
            *chain.from_iterable(weights),
        )  # fmt: skip
        return y

    def weigh(self, logs: Tensor, first: int, sums: TileSums) -> None:
        """Turns logarithms of weights into weights, in place, and adds them to running sums.

        Args:
            logs: ``[B, rows, columns]`` float32, dense.
            first: Index of the first column's key.
            sums: Of these rows and these columns.
        """
        largest, top = sums.largest or (None, None), sums.top or (None, None)
        of_rows = (sums.entropy, sums.squares, *largest)
        strides = [x.stride(0) for x in of_rows if x is not None]
        strides += [x.stride(0) // x.shape[-1] for x in top if x is not None]
        if len(set(strides)) > 1:
            raise ValueError(f"sums of rows must have one batch stride: got {strides}")
        self._tile_sums(
            self._index, torch.get_num_threads(), logs.data_ptr(), *logs.shape, first,
            *map(address, of_rows), strides[0] if strides else 0,
            *map(address, top), 0 if top[0] is None else top[0].shape[-1],
            *table(sums.received),
        )  # fmt: skip
