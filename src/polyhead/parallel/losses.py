"""The loss of a rank's own tokens, weighed so that averaged gradients are those of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from polyhead.parallel.ranks import (
    AVERAGED,
    Ranks,
    agreed,
    check_mesh,
    check_same,
    fingerprint,
)


def cross_entropy(
    logits: Tensor, labels: Tensor, mesh: DeviceMesh, *, ignore_index: int = -100
) -> Tensor:
    """Mean negative log-likelihood of the tokens of all ranks; differentiable.

    Ranks may hold different numbers of tokens: the average over data, shard, context and expert of
    the gradients of this loss is the gradient of the mean over all tokens.

    Args:
        logits: ``[B, T, W]`` of this rank's tokens; after ``parallelize(loss_parallel=True)`` a
            DTensor of which each rank of tensor holds some of the vocabulary.
        labels: ``[B, T]`` of this rank's tokens: cut texts into inputs and labels first, then
            ``parallel.shard`` both.
        mesh: As of ``parallelize``.
        ignore_index: A label that does not count.

    Returns:
        The same number on all ranks.

    Raises:
        RankError: A rank makes another call; names it. On all ranks.
        ValueError: Labels of other tokens, or outside the vocabulary; the other ranks raise
            RankError.
    """
    check_mesh(mesh)
    dimensions = [Ranks.of(mesh, name) for name in mesh.mesh_dim_names or ()]
    whole, refused, facts = isinstance(logits, DTensor), None, [0]
    try:
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"labels must be {list(logits.shape[:-1])}, the tokens of logits: got "
                f"{list(labels.shape)}"
            )
        here = labels[labels != ignore_index]
        if here.numel() and not 0 <= int(here.min()) <= int(here.max()) < logits.shape[-1]:
            raise ValueError(
                f"labels must be 0 to {logits.shape[-1] - 1}, or ignore_index={ignore_index}: got "
                f"{int(here.min())} to {int(here.max())}"
            )
        learns = torch.is_grad_enabled() and logits.requires_grad
        facts = [fingerprint(whole, str(logits.dtype), logits.shape[-1], ignore_index, learns)]
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = error

    def check(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
        check_same(ranks, "the kind of logits", [each for (each,) in found])

    checks = [(ranks, partial(check, ranks)) for ranks in dimensions]
    agreed(checks, "parallel.cross_entropy", facts, refused)
    if isinstance(logits, DTensor):
        losses = _by_vocabulary(logits, labels, ignore_index)
    else:
        losses = F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum"
        )
    count = (labels != ignore_index).sum()
    totals = torch.stack((losses.detach().double(), count.double()))
    ranks = 1
    for each in dimensions:
        if each.name in AVERAGED:
            ranks *= each.size
            with each.watched("a sum of losses"):
                dist.all_reduce(totals, group=each.group)
    total, tokens = totals
    mine = losses * (ranks / tokens).to(losses.dtype)
    mean: Tensor = mine + ((total / tokens).to(losses.dtype) - mine).detach()
    return mean


def _by_vocabulary(logits: DTensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The sum over tokens, of logits of which each rank holds some columns."""
    loss: Tensor = _OfColumns.apply(logits.to_local(), logits, labels, ignore_index)  # type: ignore[no-untyped-call]
    return loss


class _OfColumns(torch.autograd.Function):
    """torch's ``loss_parallel``, whose backward pass must run inside its block: it runs at once."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, logits: DTensor, labels: Tensor, ignore_index: int
    ) -> Tensor:
        shape = torch.Size((labels.numel(), logits.shape[-1]))
        with torch.enable_grad(), loss_parallel():
            leaf = DTensor.from_local(
                local.detach().flatten(0, -2), logits.device_mesh,
                [Shard(1)],
                run_check=False, shape=shape, stride=(shape[1], 1),
            ).requires_grad_()  # fmt: skip
            loss = F.cross_entropy(
                leaf, labels.flatten(), ignore_index=ignore_index, reduction="sum"
            )
            if ctx.needs_input_grad[0]:
                (grad,) = torch.autograd.grad(loss, leaf)
                ctx.save_for_backward(grad.to_local().view_as(local))  # type: ignore[attr-defined]
        whole: Tensor = loss.detach().to_local()  # type: ignore[attr-defined]
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grads[0], None, None, None
