"""Experts by rank: tokens travel to the ranks of their experts and back (Lepikhin et al. 2020).

    counts   how many tokens each rank has for each expert
    rows     the tokens, sorted by expert, there
    made     what experts give, back, where it is weighed and summed

A rank of ``expert`` has X / N of the X routed experts of each layer, and batch rows of its own:
everything else is computed as over ``data``. An expert's gradient has come from the tokens of all
ranks of ``expert`` when they are averaged over the others, so it is divided by N where it is made.

Shape letters: M tokens of a rank, E embed size, K experts visited, X experts, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyhead.layers.experts import Experts
from polyhead.parallel.collectives import all_to_all
from polyhead.parallel.ranks import Ranks, unsupported


class Absent(nn.Module):
    """An expert that is on another rank."""


@dataclass(eq=False)
class Travels:
    """``Experts._visited`` where experts are on many ranks.

    Attributes:
        module: Mixture-of-experts module.
        ranks: Those of ``expert``.
        averaged: Whether gradients are averaged over ranks.
    """

    module: Experts
    ranks: Ranks
    averaged: bool

    def __call__(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        X, N = self.module.config.num_experts, self.ranks.size
        visits = chosen.flatten()
        order = visits.argsort(stable=True)
        rows, places = order // chosen.shape[1], order % chosen.shape[1]
        weight = weights[rows, places, None]
        into = self.module.config.weighs == "input"
        counts = torch.bincount(visits, minlength=X)
        received = torch.empty_like(counts)
        with self.ranks.watched("an exchange of counts"):
            dist.all_to_all_single(received, counts, group=self.ranks.group)
        received = received.view(N, X // N)
        leaving, coming = (
            counts.view(N, -1).sum(dim=1).tolist(),
            received.sum(dim=1).tolist(),
        )
        sent = flat[rows]
        there = all_to_all(
            sent * weight.to(flat.dtype) if into else sent, leaving, coming, self.ranks
        )
        made = self._made(there, received)
        back = all_to_all(made, coming, leaving, self.ranks)
        if not into:
            back = back * weight
        return torch.zeros_like(flat).index_add(0, rows, back.to(flat.dtype))

    def _made(self, x: Tensor, received: Tensor) -> Tensor:
        """What this rank's experts give, ``received[rank, expert]`` rows of each rank for each."""
        N, each = received.shape
        share = N if self.averaged else 1
        x = _scaled(x, share)
        numbers = (
            torch.arange(each, device=x.device).repeat(N).repeat_interleave(received.flatten())
        )
        order = numbers.argsort(stable=True)
        parts = torch.split(x[order], received.sum(dim=0).tolist())
        first = each * self.ranks.rank
        made = [
            self.module.experts[first + i](part)
            for i, part in enumerate(parts)
            if len(part) or self.module.calls_all
        ]
        joined = torch.cat(made) if made else x
        return _scaled(joined[order.argsort()], 1 / share)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None


def _scaled(x: Tensor, factor: float) -> Tensor:
    """x, its gradient times ``factor``."""
    y: Tensor = _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return y


def mixtures(model: nn.Module) -> list[Experts]:
    """All mixtures of experts of a model."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def check_experts(model: nn.Module, ranks: Ranks) -> None:
    """Raises for experts that the ranks cannot share.

    Raises:
        UnsupportedError: No experts, or numbers that do not divide.
    """
    found = mixtures(model)
    if not found:
        raise unsupported("a model without experts on the dimension 'expert'")
    for module in found:
        if module.config.num_experts % ranks.size:
            raise unsupported(
                f"{module.config.num_experts} experts on {ranks.size} ranks of 'expert': they must "
                "be a multiple of the ranks"
            )


def share_experts(model: nn.Module, ranks: Ranks, *, averaged: bool) -> None:
    """From now on a rank has its experts alone."""
    for module in mixtures(model):
        each = module.config.num_experts // ranks.size
        for number in range(module.config.num_experts):
            if number // each != ranks.rank:
                module.experts[number] = Absent()
        module._visited = Travels(module, ranks, averaged)  # type: ignore[method-assign]


def own_experts(model: nn.Module) -> list[nn.Module]:
    """The experts that only ranks with this one's number have."""
    return [
        expert
        for module in mixtures(model)
        if "_visited" in vars(module)
        for expert in module.experts
        if not isinstance(expert, Absent)
    ]


def ranks_of_experts(model: nn.Module) -> Ranks | None:
    """The ranks of ``expert``, or None if every rank has all experts."""
    found = [vars(module)["_visited"] for module in mixtures(model) if "_visited" in vars(module)]
    return found[0].ranks if found else None
