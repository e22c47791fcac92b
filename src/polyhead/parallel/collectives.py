"""Collectives that autograd knows.

    CopyToRanks       identity; the backward pass is an all-reduce (f of Shoeybi et al. 2019, §3)
    ReduceFromRanks   all-reduce; the backward pass is the identity (g)
    AllToAll          each rank sends some rows to every other; gradients go back

A region between f and g computes some heads or features on each rank. Everything that it reads and
that is replicated enters by ``CopyToRanks``, parameters too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.parallel.ranks import Ranks


class CopyToRanks(torch.autograd.Function):
    """x; the gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(grads[0], ctx.ranks), None


class ReduceFromRanks(torch.autograd.Function):
    """The sum of all ranks' x; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return all_reduce(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class AllToAll(torch.autograd.Function):
    """What other ranks sent to this one, in their order; gradients go back where they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaving: list[int], coming: list[int], ranks: Ranks) -> Tensor:
        ctx.leaving, ctx.coming, ctx.ranks = leaving, coming, ranks
        return _all_to_all(x, leaving, coming, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.coming, ctx.leaving, ctx.ranks), None, None, None


def _all_to_all(x: Tensor, leaving: list[int], coming: list[int], ranks: Ranks) -> Tensor:
    y = x.new_empty(sum(coming), *x.shape[1:])
    with ranks.watched("a trade"):
        dist.all_to_all_single(y, x.contiguous(), coming, leaving, group=ranks.group)
    return y


def all_to_all(x: Tensor, leaving: list[int], coming: list[int], ranks: Ranks) -> Tensor:
    """Rows of x to other ranks, and theirs to this one; differentiable.

    Args:
        x: ``[sum(leaving), ...]``, those for the first rank first.
        leaving: Rows for each rank.
        coming: Rows from each rank.
        ranks: Who trades.

    Returns:
        ``[sum(coming), ...]``, those of the first rank first.
    """
    y: Tensor = AllToAll.apply(x, leaving, coming, ranks)  # type: ignore[no-untyped-call]
    return y


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """x, whose gradient is summed over the ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    y: Tensor = CopyToRanks.apply(x, ranks)  # type: ignore[no-untyped-call]
    return y


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """A new tensor: the sum of x over the ranks."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with ranks.watched("a sum"):
        dist.all_reduce(total, group=ranks.group)
    return total
