"""The loss of a rank's own tokens, weighed so that averaged gradients are those of all tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.parallel.ranks import Ranks, check_mesh


def cross_entropy(
    logits: Tensor, labels: Tensor, mesh: DeviceMesh, *, ignore_index: int = -100
) -> Tensor:
    """Mean negative log-likelihood of the tokens of all ranks; differentiable.

    Ranks may hold different numbers of tokens: the average over data, shard and context of the
    gradients of this loss is the gradient of the mean over all tokens.

    Args:
        logits: ``[B, T, W]`` of this rank's tokens.
        labels: ``[B, T]`` of this rank's tokens: cut texts into inputs and labels first, then
            ``parallel.shard`` both.
        mesh: As of ``parallelize``.
        ignore_index: A label that does not count.

    Returns:
        The same number on all ranks.
    """
    check_mesh(mesh)
    losses = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    count = (labels != ignore_index).sum()
    totals = torch.stack((losses.detach().double(), count.double()))
    ranks = 1
    for name in ("data", "shard", "context"):
        if name in (mesh.mesh_dim_names or ()):
            each = Ranks.of(mesh, name)
            ranks *= each.size
            with each.watched("a sum of losses"):
                dist.all_reduce(totals, group=each.group)
    total, tokens = totals
    mine = losses * (ranks / tokens).to(losses.dtype)
    mean: Tensor = mine + ((total / tokens).to(losses.dtype) - mine).detach()
    return mean
