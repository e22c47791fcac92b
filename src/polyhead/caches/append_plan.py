"""Which new tokens are stored, in which row, and at which positions.

A token at a position below 0 is padding and is left out. Rows that stand at the same token and
keep the same columns are written together; a batch without padding, all rows equally long, is one
such group and is never indexed.

Shape letters: B batch, T tokens that arrive.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.caches.source import NO_POSITION


@dataclass(frozen=True, eq=False, slots=True)
class AppendPlan:
    """One append, row by row.

    Attributes:
        groups: Rows and the columns that they keep; None: all.
        counts: Tokens that each row keeps.
        positions: ``[B, T]`` int64, below 0 for padding; None: each row counts on from its length.
        explicit: Whether a position is not simply the number of tokens before it in its row.
    """

    groups: list[tuple[list[int] | None, list[int] | None]]
    counts: list[int]
    positions: Tensor | None
    explicit: bool


def plan_append(
    batch: int,
    count: int,
    lengths: Sequence[int],
    positions: Tensor | None,
    *,
    explicit: bool,
    states: Sequence[Hashable],
) -> AppendPlan:
    """Works out which tokens of an append go where.

    Args:
        batch: Batch size B.
        count: Number of new tokens T.
        lengths: Tokens that each row has already.
        positions: ``[T]``, ``[1, T]`` or ``[B, T]``, as the caller gave them.
        explicit: Whether positions are stored already.
        states: Rows with equal states may be written together.

    Raises:
        TypeError: Positions that are not whole numbers.
        ValueError: Positions of another shape, too large, or none where they are needed.
    """
    if positions is None:
        if explicit:
            raise ValueError(
                "positions must be given at every append: this cache holds tokens with positions "
                "of their own"
            )
        if len(set(states)) > 1:
            raise ValueError(
                "positions must be given at every append: rows differ in length or have been taken "
                f"back differently (lengths {list(lengths)}); see next_positions"
            )
        return AppendPlan(_grouped(states, None), [count] * batch, None, explicit=False)
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of whole numbers: got {got}")
    if positions.shape not in ((count,), (1, count), (batch, count)):
        raise ValueError(
            f"positions must be [T] = [{count}] or [B, T] = [{batch}, {count}]: got "
            f"{list(positions.shape)}"
        )
    where = positions.detach().to("cpu", torch.int64).expand(batch, count)
    real = where >= 0
    counted = torch.tensor(lengths, device="cpu")[:, None] + real.cumsum(dim=1) - 1
    explicit = explicit or not bool((where == counted).logical_or(~real).all())
    if explicit and bool((where >= NO_POSITION).any()):
        raise ValueError(f"positions must be below {NO_POSITION:,}: got {int(where.max()):,}")
    columns = None
    if not bool(real.all()):
        columns = [row.nonzero()[:, 0].tolist() for row in real]
    counts = real.sum(dim=1).tolist()
    return AppendPlan(_grouped(states, columns), counts, where, explicit)


def _grouped(
    states: Sequence[Hashable], columns: list[list[int]] | None
) -> list[tuple[list[int] | None, list[int] | None]]:
    groups: dict[Hashable, list[int]] = {}
    for row, state in enumerate(states):
        key = (state, None if columns is None else tuple(columns[row]))
        groups.setdefault(key, []).append(row)
    if len(groups) == 1:
        return [(None, None if columns is None else columns[0])]
    return [(rows, None if columns is None else columns[rows[0]]) for rows in groups.values()]
