"""A mask over blocks of tokens: which block of queries may look at which block of keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.semantics.masks.algebra import Mask, Range, Selection, Visibility
from polyhead.semantics.masks.explicit import of_heads
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs
from polyhead.semantics.tokens import Span, Tokens, is_traced


class BlockSparse(Mask, arguments={"blocks": Tensor, "block_size": int}):
    """Block-sparse attention (Child et al. 2019; Zaheer et al. 2020): tokens in runs of one size.

    A query sees the keys of the blocks that are True for its own block. Blocks count places, from
    the first token of the sequence; ``& Causal()`` hides what is later within a block.

    Args:
        blocks: bool ``[blocks of queries, blocks of keys]``, and before these, if rows or heads
            differ, ``[1 or B, 1 or H]`` or ``[1 or H]``.
        block_size: Tokens of a block.

    Raises:
        TypeError: Not a bool tensor.
        ValueError: Other dimensions, ``block_size`` below 1, or (in a call) more keys than blocks.
    """

    compares = "places"

    def __init__(self, blocks: Tensor, block_size: int) -> None:
        if not isinstance(blocks, Tensor) or blocks.dtype != torch.bool:
            got = blocks.dtype if isinstance(blocks, Tensor) else type(blocks).__name__
            raise TypeError(f"BlockSparse blocks must be a bool tensor: got {got}")
        if not 2 <= blocks.ndim <= 4 or not blocks.numel():
            raise ValueError(
                "BlockSparse blocks must be [B, H, blocks of queries, blocks of keys], the first "
                f"two if they differ: got shape {list(blocks.shape)}"
            )
        self.blocks = blocks[(None,) * (4 - blocks.ndim)]
        self.block_size = check_int("BlockSparse block_size", block_size, least=1)
        self._seen: tuple[list[list[int]], list[list[int]]] | None = None
        """How many blocks before a corner some query sees, and how many all queries see."""
        if not is_traced(blocks):
            some, every = self.blocks.any(dim=1).any(dim=0), self.blocks.all(dim=1).all(dim=0)
            self._seen = _sums(some), _sums(every)

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        size = of.number(self.block_size)
        q, k = of.q_place, of.k_place
        # More queries than keys have places below 0: they belong to the first block.
        return of.look_up(
            self.blocks.to(of.device),
            lambda pair: q(pair).clamp(min=0) // size(pair),
            lambda pair: k(pair) // size(pair),
        )

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if self._seen is None:
            return Visibility.SOME
        rows, columns = self._blocks(q.places), self._blocks(k.places)
        some, every = (_within(sums, rows, columns) for sums in self._seen)
        if not some:
            return Visibility.NONE
        area = (rows.high - rows.low + 1) * (columns.high - columns.low + 1)
        return Visibility.ALL if every == area else Visibility.SOME

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range | None:
        size, first = self.block_size, q.places.low
        in_order = q.stride == k.stride == 1 and first >= 0 and k.places.low % size == 0
        if not in_order or self._seen is None or device.type != "cpu":
            return None
        blocks = self.blocks[:, :, first // size : q.places.high // size + 1]
        number = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        number = (number - k.places.low // size).where(blocks.gather(-1, number), -1)
        most = int(blocks.sum(dim=-1).max()) if blocks.numel() else 0
        return Range(None, None, chosen=Selection(number[..., :most], size, size, first % size))

    def _blocks(self, places: Span) -> Span:
        """The first and the last block of a run of places."""
        first, last = (max(0, place) // self.block_size for place in places)
        return Span(first, max(first, last))

    def of_heads(self, heads: Sequence[int]) -> Mask:
        return BlockSparse(of_heads(self.blocks, heads), self.block_size)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        if len(self.blocks) == 1:
            return self
        return BlockSparse(self.blocks[list(rows)], self.block_size)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        B, H, rows, columns = self.blocks.shape
        if 1 != B != batch or 1 != H != heads:
            raise ValueError(
                f"BlockSparse blocks must be of 1 or {batch} batch rows and 1 or {heads} heads: "
                f"got {B} and {H}"
            )
        held = min(rows, columns) * self.block_size
        if keys > held:
            raise ValueError(
                f"BlockSparse has blocks for {held} tokens ({rows}×{columns} blocks of "
                f"{self.block_size}): got {keys} keys"
            )

    def __repr__(self) -> str:
        return f"BlockSparse({list(self.blocks.shape)}, block_size={self.block_size})"


def _sums(blocks: Tensor) -> list[list[int]]:
    """``[rows + 1][columns + 1]``: how many blocks above and left of each corner are True."""
    sums = [[0] * (blocks.shape[1] + 1)]
    for row in blocks.long().tolist():
        sums.append([a + b for a, b in zip(sums[-1], accumulate(row, initial=0), strict=True)])
    return sums


def _within(sums: list[list[int]], rows: Span, columns: Span) -> int:
    """How many blocks of a rectangle are True."""
    top, bottom = sums[rows.low], sums[rows.high + 1]
    left, right = columns.low, columns.high + 1
    return bottom[right] - bottom[left] - top[right] + top[left]
