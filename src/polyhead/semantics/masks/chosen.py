"""A mask of chosen keys: the blocks that each query may look at (sparse attention)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.semantics.masks.algebra import Mask, Range, Selection, Visibility
from polyhead.semantics.tokens import Tokens


class Chosen(Mask, arguments={"blocks": Tensor, "size": int, "group": int}):
    """The keys that each query chose: what an indexer or a router of sparse attention returns.

    Key j is visible where j // size is among the query's blocks: size 1 chooses single keys
    (DeepSeek-V3.2, 2512.02556), larger ones blocks of neighbours (NSA, 2502.11089; MoBA,
    2502.13189; Quest, 2406.10774). Native code reads the chosen keys alone, where they lie. It
    combines with other masks: ``Causal() & Chosen(blocks, 64)`` hides what is later within a block.

    Args:
        blocks: Whole numbers ``[B, H / group, T, m]``, of which all but the last may be 1; fewer
            dimensions are filled up from the left. In any order; one that is given twice counts
            once, and one that is negative or behind the last key holds no key, so rows are filled
            up with -1. They count the keys of the call, from its first.
        size: Keys of a block.
        group: Query heads that share a choice: H / G where each kv head has one.

    Raises:
        TypeError: Not a tensor of whole numbers.
        ValueError: Other dimensions, a size or group below 1, or (in a call) another number of
            rows, heads or queries.
    """

    compares = "indexes"

    def __init__(self, blocks: Tensor, size: int = 1, group: int = 1) -> None:
        whole = isinstance(blocks, Tensor) and blocks.dtype in _WHOLE
        if not whole:
            got = (
                f"a {blocks.dtype} tensor" if isinstance(blocks, Tensor) else type(blocks).__name__
            )
            raise TypeError(f"Chosen blocks must be a tensor of whole numbers: got {got}")
        if not 1 <= blocks.ndim <= 4:
            raise ValueError(
                "Chosen blocks must be [B, H / group, T, m], or fewer dimensions of these from the "
                f"right: got shape {list(blocks.shape)}"
            )
        self.blocks = blocks[(None,) * (4 - blocks.ndim)]
        self.size = check_int("Chosen size", size, least=1)
        self.group = check_int("Chosen group", group, least=1)

    @classmethod
    def top(cls, scores: Tensor, count: int, size: int = 1, group: int = 1) -> Chosen:
        """The ``count`` blocks that score highest for each query; of equal ones the first.

        Blocks that score -inf or NaN are never chosen, so hide with -inf what a query may not
        choose. No gradient flows to the scores.

        Args:
            scores: ``[B, H / group, T, blocks]`` of floating point, or fewer of these dimensions
                from the right.
            count: Blocks that a query chooses, fewer where it has no more.
            size: As in ``Chosen``.
            group: As in ``Chosen``.

        Raises:
            TypeError: Not a tensor of floating point.
            ValueError: A ``count`` below 1, and what ``Chosen`` refuses.
        """
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"Chosen.top scores must be a floating-point tensor: got {got}")
        count = check_int("Chosen.top count", count, least=1)
        if not 1 <= scores.ndim <= 4:
            return cls(scores.long(), size, group)  # raises
        scores = scores.detach()[(None,) * (4 - scores.ndim)]
        rows = max(1, _SCORES // max(1, scores[:, :, :1].numel()))
        parts = [_first_of_the_highest(part, count) for part in torch.split(scores, rows, dim=2)]
        return cls(torch.cat(parts, dim=2), size, group)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        blocks = self.blocks
        if blocks.shape[-2] != 1:
            blocks = blocks[:, :, q.start : q.start + q.length]
        first = k.start // self.size
        count = (k.start + max(1, k.length) - 1) // self.size - first + 1
        blocks = blocks.to(device).long() - first
        # The last column is for the blocks that have no key here.
        blocks = blocks.where((blocks >= 0) & (blocks < count), count)
        chosen = torch.zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool, device=device)
        chosen = chosen.scatter(-1, blocks, True)
        keys = torch.arange(k.start, k.start + k.length, device=device) // self.size - first
        chosen = chosen[..., keys]
        if self.group > 1 and chosen.shape[1] > 1:
            chosen = chosen.repeat_interleave(self.group, dim=1)
        return chosen

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return Visibility.SOME if self.blocks.shape[-1] else Visibility.NONE

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        return Range(None, None, chosen=Selection(self.blocks, self.size))

    def made_for(self) -> tuple[int, int]:
        last = int(self.blocks.max()) if self.blocks.numel() else 0
        return self.blocks.shape[-2], max(1, (last + 1) * self.size)

    def of_heads(self, heads: Sequence[int]) -> Chosen:
        if self.blocks.shape[1] == 1:
            return self
        heads = list(heads)
        whole = heads[:: self.group]
        if heads == [h + i for h in whole for i in range(self.group)] and not any(
            h % self.group for h in whole
        ):
            return Chosen(self.blocks[:, [h // self.group for h in whole]], self.size, self.group)
        return Chosen(self.blocks[:, [h // self.group for h in heads]], self.size)

    def of_tokens(self, queries: slice, keys: slice) -> Chosen:
        blocks = self.blocks
        if blocks.shape[-2] != 1:
            blocks = blocks[:, :, queries]
        start, step = keys.start or 0, keys.step or 1
        if step == 1 and start % self.size == 0:
            return Chosen(blocks.long() - start // self.size, self.size, self.group)
        # Keys that no longer stand in whole blocks are chosen one by one.
        inside = torch.arange(self.size, device=blocks.device)
        keys_of = (blocks.long()[..., None] * self.size + inside).flatten(-2) - start
        return Chosen((keys_of // step).where(keys_of % step == 0, -1), 1, self.group)

    def of_rows(self, rows: Sequence[int]) -> Chosen:
        if len(self.blocks) == 1:
            return self
        return Chosen(self.blocks[list(rows)], self.size, self.group)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        shape = list(self.blocks.shape[:3])
        if heads % self.group:
            raise ValueError(f"Chosen group must divide the {heads} query heads: got {self.group}")
        wanted = [batch, heads // self.group, queries]
        if any(1 != have != want for have, want in zip(shape, wanted, strict=True)):
            raise ValueError(
                f"Chosen blocks must be [B, H / group, T, m] = [{', '.join(map(str, wanted))}, m], "
                f"or 1 in place of these: got {list(self.blocks.shape)}, group {self.group}"
            )

    def __repr__(self) -> str:
        group = f", group={self.group}" if self.group > 1 else ""
        return f"Chosen({list(self.blocks.shape)}, size={self.size}{group})"


def _first_of_the_highest(scores: Tensor, count: int) -> Tensor:
    """Indexes of the ``count`` highest scores, ascending; -1 where there are fewer."""
    length = scores.shape[-1]
    count = min(count, length)
    if not count:
        return scores.new_empty(*scores.shape[:-1], 0, dtype=torch.int64)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    least = scores.topk(count, dim=-1).values[..., -1:]
    higher, equal = scores > least, (scores == least) & (least > -torch.inf)
    left = count - higher.sum(dim=-1, keepdim=True)
    taken = higher | (equal & (equal.cumsum(dim=-1) <= left))
    # What is not taken goes to one more column, which is dropped.
    column = (taken.cumsum(dim=-1) - 1).where(taken, count)
    indexes = torch.arange(length, device=scores.device).expand_as(scores)
    found = indexes.new_full((*scores.shape[:-1], count + 1), -1)
    return found.scatter(-1, column, indexes)[..., :count]


_SCORES = 1 << 20
"""Scores that are ranked at a time."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
