"""Sums over ranks that autograd knows.

    Entered   the same numbers on all ranks go in; their gradients are summed
    Summed    parts go in, their sum comes out on all ranks; gradients pass

A region between the two computes some heads or features on each rank (Shoeybi et al. 2019, §3:
f and g). Whatever it reads that is whole on every rank goes in by ``Entered``, parameters too.
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
