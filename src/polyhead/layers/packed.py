"""Rows that take different numbers of tokens in one call: ``[1, N]``, one row after the other.

Native code computes the packed tokens (``decode_plan.steps``). Modules get rows of one length,
padded at the end; padding has positions below 0, and caches leave it out.

Shape letters: B rows, T tokens of the row that has the most, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor


def following(firsts: Iterable[int], counts: Iterable[int]) -> list[int]:
    """The next ``counts`` numbers of each row from its first on, one row after the other."""
    rows = zip(firsts, counts, strict=True)
    return [each for first, count in rows for each in range(first, first + count)]


class PackedRows:
    """Which tokens of a call belong to which row.

    Args:
        counts: Tokens of each row, at least 1.
        lengths: Tokens that its cache holds already, of each row.
        device: Of the tensors.

    Attributes:
        counts: As given.
        positions: ``[1, N]`` of the tokens.
    """

    def __init__(self, counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.counts = [*counts]
        self.positions = torch.tensor([following(lengths, counts)], device=device)
        self._shape = len(self.counts), max(self.counts)

    @cached_property
    def _places(self) -> Tensor:
        """``[N]`` where the tokens stand among those of padded rows."""
        B, T = self._shape
        firsts = range(0, B * T, T)
        return torch.tensor(following(firsts, self.counts), device=self.positions.device)

    @cached_property
    def padded_positions(self) -> Tensor:
        """``[B, T]``, below 0 for padding."""
        return self.padded(self.positions + 1) - 1

    def padded(self, x: Tensor) -> Tensor:
        """``[1, N, …]`` as ``[B, T, …]``, with zeros for padding."""
        B, T = self._shape
        rows = x.new_zeros(B * T, *x.shape[2:])
        rows[self._places] = x[0]
        return rows.view(B, T, *x.shape[2:])

    def packed(self, x: Tensor) -> Tensor:
        """``[B, T, …]`` as ``[1, N, …]``, without the padding."""
        return x.flatten(0, 1)[self._places][None]
