"""Collectives that autograd knows.

A region between ``copy_to_ranks`` and ``reduce_from_ranks`` computes some heads or features on each
rank. All that it reads and that is replicated enters by the first, parameters too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.native.batch_invariant import is_enabled
from polyhead.parallel.ranks import Ranks

Collective = Callable[[Tensor], Tensor]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Collective, adjoint: Collective) -> Tensor:
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(grads[0]), None, None


def differentiable(x: Tensor, run: Collective, adjoint: Collective) -> Tensor:
    """``run(x)``, whose gradient is ``adjoint`` of the output's."""
    y: Tensor = _Collective.apply(x, run, adjoint)  # type: ignore[no-untyped-call]
    return y


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
        ranks: Ranks that exchange rows.

    Returns:
        ``[sum(coming), ...]``, those of the first rank first.
    """
    return differentiable(
        x,
        lambda rows: _all_to_all(rows, leaving, coming, ranks),
        lambda grad: _all_to_all(grad, coming, leaving, ranks),
    )


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """x, whose gradient is summed over the ranks (f of Shoeybi et al. 2019, §3)."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return differentiable(x, lambda whole: whole.view_as(whole), lambda g: all_reduce(g, ranks))


def reduce_from_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of x over the ranks, whose gradient is that of each term (g of the same)."""
    return differentiable(x, lambda part: all_reduce(part, ranks), lambda grad: grad)


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """A new tensor: the sum of x over the ranks.

    Within ``batch_invariant()`` every number is added in the order of the ranks, whatever its place
    in x: each rank gets all terms. Else the backend chooses the order.
    """
    if is_enabled():
        terms = [x.new_empty(x.shape) for _ in range(ranks.size)]
        with ranks.watched("a sum"):
            dist.all_gather(terms, x.detach().contiguous(), group=ranks.group)
        return sum(terms[1:], start=terms[0])
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with ranks.watched("a sum"):
        dist.all_reduce(total, group=ranks.group)
    return total
