"""What training over processes needs besides torch's own: one norm of all gradients, whole weights.

Everything else is torch's: optimisers step DTensors, ``torch.distributed.checkpoint`` saves each
rank's share and loads it on another number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyhead._utils.checks import check_number
from polyhead.errors import DivergedError
from polyhead.layers.experts import Experts
from polyhead.parallel.calls import DIMENSIONS
from polyhead.parallel.collectives import all_reduce
from polyhead.parallel.experts import own_experts, ranks_of_experts
from polyhead.parallel.ranks import Ranks, agreed, check_same, fingerprint


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, for a model whose parameters are cut in different ways:
    some over ``tensor``, some over ``shard``, some whole.

    Args:
        model: After a backward pass.
        max_norm: Maximum gradient norm, above 0.

    Returns:
        The norm of all gradients, the same on all ranks.

    Raises:
        RankError: A rank makes another call, or has no gradients where others have; names it. On
            all ranks.
        DivergedError: The norm is not finite; gradients are as they were.
    """
    refused: Exception | None = None
    try:
        check_number("max_norm", max_norm, above=0)
    except (TypeError, ValueError) as error:
        refused = error
    _agree(model, "parallel.clip_grad_norm", refused, max_norm)
    squares: dict[Any, list[Tensor]] = defaultdict(list)
    locals_ = []
    own = {parameter for expert in own_experts(model) for parameter in expert.parameters()}
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is None:
            continue
        key = None
        if isinstance(grad, DTensor):
            key = grad.device_mesh, tuple(grad.placements)
            grad = grad.to_local()
        locals_.append(grad)
        squares[key, parameter in own].append(grad.detach().double().square().sum())
    total, experts = 0.0, ranks_of_experts(model)
    for (key, on_one_rank), parts in squares.items():
        square = torch.stack(parts).sum()
        if experts is not None and on_one_rank:
            square = all_reduce(square, experts)
        if key is not None:
            mesh, placements = key
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():
                    name = (mesh.mesh_dim_names or ("mesh",) * (dim + 1))[dim]
                    ranks = Ranks.of_group(mesh.get_group(dim), name, mesh.device_type)
                    square = all_reduce(square, ranks)
        total += square.item()
    norm = math.sqrt(total) if total >= 0 else math.nan
    if not math.isfinite(norm):
        raise DivergedError(f"the norm of all gradients is {norm}")
    if norm > max_norm:
        for grad in locals_:
            grad.mul_(max_norm / norm)
    return norm


def _agree(model: nn.Module, what: str, refused: Exception | None, *arguments: object) -> None:
    """The ranks agree on what they are about to do with a model, and on which gradients it has."""
    learned = [(p.grad is not None, isinstance(p, DTensor)) for p in model.parameters()]

    def check(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
        given, gradients = zip(*found, strict=True)
        check_same(ranks, f"the arguments of {what}", given)
        if ranks.name != "expert":  # whose ranks have experts of their own
            check_same(ranks, "which parameters have gradients", gradients)

    dimensions = DIMENSIONS.get(model, ())
    facts = [fingerprint(*arguments), fingerprint(learned)]
    agreed([(ranks, partial(check, ranks)) for ranks in dimensions], what, facts, refused)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """A state dict of whole tensors on the CPU, on every rank; loads into a model of one process.

    Args:
        model: After ``parallelize``. All ranks call this together.

    Raises:
        RankError: A rank makes another call; names it. On all ranks.
    """
    _agree(model, "parallel.whole_state", None)
    found = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()
        for name, x in model.state_dict().items()
    }
    ranks = ranks_of_experts(model)
    if ranks is not None:
        for path, module in model.named_modules():
            if isinstance(module, Experts):
                _fetch_experts(found, f"{path}.experts.", module, ranks)
    return found


def _fetch_experts(found: dict[str, Tensor], prefix: str, module: Experts, ranks: Ranks) -> None:
    """Adds the experts of other ranks: all experts of a layer have the same shapes."""
    each = len(module.experts) // ranks.size
    mine = f"{prefix}{each * ranks.rank}."
    shapes = {name.removeprefix(mine): x for name, x in found.items() if name.startswith(mine)}
    for index in range(len(module.experts)):
        for leaf, like in shapes.items():
            name, owner = f"{prefix}{index}.{leaf}", index // each
            x = found[name] if owner == ranks.rank else torch.empty_like(like)
            moved = x.to(ranks.device)
            dist.broadcast(moved, ranks.global_rank(owner), group=ranks.group)
            found[name] = moved.cpu()
