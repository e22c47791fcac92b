"""Sums and trades over ranks that autograd knows.

    Entered   the same numbers on all ranks go in; their gradients are summed
    Summed    parts go in, their sum comes out on all ranks; gradients pass
    Traded    each rank sends each other one some numbers; gradients go back

A region between the two computes some heads or features on each rank (Shoeybi et al. 2019, §3:
f and g). Everything that it reads and that is whole on every rank enters by ``Entered``, parameters
too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.parallel.ranks import Ranks


class Entered(torch.autograd.Function):
    """x; the gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return summed(grads[0], ctx.ranks), None


class Summed(torch.autograd.Function):
    """The sum of all ranks' x; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class Traded(torch.autograd.Function):
    """What other ranks sent to this one, in their order; gradients go back where they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaving: list[int], coming: list[int], ranks: Ranks) -> Tensor:
        ctx.leaving, ctx.coming, ctx.ranks = leaving, coming, ranks
        return _trade(x, leaving, coming, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _trade(grads[0], ctx.coming, ctx.leaving, ctx.ranks), None, None, None


def _trade(x: Tensor, leaving: list[int], coming: list[int], ranks: Ranks) -> Tensor:
    y = x.new_empty(sum(coming), *x.shape[1:])
    with ranks.watched("a trade"):
        dist.all_to_all_single(y, x.contiguous(), coming, leaving, group=ranks.group)
    return y


def traded(x: Tensor, leaving: list[int], coming: list[int], ranks: Ranks) -> Tensor:
    """Rows of x to other ranks, and theirs to this one; differentiable.

    Args:
        x: ``[sum(leaving), ...]``, those for the first rank first.
        leaving: Rows for each rank.
        coming: Rows from each rank.
        ranks: Who trades.

    Returns:
        ``[sum(coming), ...]``, those of the first rank first.
    """
    y: Tensor = Traded.apply(x, leaving, coming, ranks)  # type: ignore[no-untyped-call]
    return y


def entered(x: Tensor, ranks: Ranks) -> Tensor:
    """x, whose gradient is summed over the ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    y: Tensor = Entered.apply(x, ranks)  # type: ignore[no-untyped-call]
    return y


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """A new tensor: the sum of x over the ranks."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with ranks.watched("a sum"):
        dist.all_reduce(total, group=ranks.group)
    return total
