"""Training over ranks: accumulated, clipped, saved in shares, resumed on another mesh."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cases_of_attention import mesh_of
from cases_of_models import W, made
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import polyhead as ph
from polyhead import parallel
from polyhead.checkpoints import Checkpoint, save_checkpoint
from polyhead.parallel.experts import mixtures


def _ids(step: int) -> torch.Tensor:
    return torch.randint(W, (2, 20), generator=torch.Generator().manual_seed(step))


def _optimiser(model: ph.Transformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def _step(model: Any, optimiser: Any, step: int, mesh: Any) -> tuple[float, float]:
    """Loss of two batches and the norm of their gradients."""
    total = 0.0
    for part in range(2):
        ids = _ids(2 * step + part)
        if mesh is None:
            logits, labels = model(ids[:, :-1]), ids[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            logits = model(parallel.shard(ids[:, :-1], mesh))
            loss = parallel.cross_entropy(logits, parallel.shard(ids[:, 1:], mesh), mesh)
        (loss / 2).backward()
        total += loss.item() / 2
    if mesh is None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    else:
        norm = parallel.clip_grad_norm(model, 0.5)
    optimiser.step()
    optimiser.zero_grad()
    return total, norm


def _spread(
    dimension: str, family: str = "Qwen 3", **options: Any
) -> tuple[ph.Transformer, Any, Any]:
    mesh = mesh_of(dimension)
    model = parallel.parallelize(made(family, torch.float64), mesh, **options)
    return model, _optimiser(model), mesh


def _near(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert abs(a - b) <= 1e-10, f"{a} for {b}"


def resumed(folder: str, first: str, second: str) -> None:
    """Two steps on one mesh, saved, and two on another equal four of one process."""
    one = made("Qwen 3", torch.float64)
    its = _optimiser(one)
    wanted = [_step(one, its, step, None) for step in range(4)]
    model, optimiser, mesh = _spread(first)
    for step in range(2):
        _near(_step(model, optimiser, step, mesh), wanted[step])
    weights, moments = get_state_dict(model, optimiser)
    dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=folder)
    del model
    model, optimiser, mesh = _spread(second)
    weights, moments = get_state_dict(model, optimiser)
    dcp.load({"model": weights, "optimiser": moments}, checkpoint_id=folder)
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)
    for step in range(2, 4):
        _near(_step(model, optimiser, step, mesh), wanted[step])
    plain = made("Qwen 3", torch.float64)
    plain.load_state_dict(parallel.whole_state(model))
    for (name, ours), theirs in zip(plain.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-8), name
    assert Path(folder).is_dir()


def alone(steps: int) -> list[tuple[float, float]]:
    """Losses and norms of one process that nobody stops."""
    model = made("Qwen 3", torch.float64)
    optimiser = _optimiser(model)
    return [_step(model, optimiser, step, None) for step in range(steps)]


def continued(
    folder: str, dimension: str, until: int, killed_at: int | None = None
) -> tuple[int, list[tuple[float, float]]]:
    """The steps from the newest whole checkpoint on, each saved in shares.

    With ``killed_at`` rank 1 is killed between the forward and the backward pass of that step.

    Returns:
        The first step, and the loss and norm of each.
    """
    model, optimiser, mesh = _spread(dimension)
    whole = [int(path.parent.name) for path in Path(folder).glob("*/.metadata")]
    first = max(whole, default=0)
    if first:  # of an optimiser that made no step torch makes one to learn what it will hold
        weights, moments = get_state_dict(model, optimiser)
        dcp.load({"model": weights, "optimiser": moments}, checkpoint_id=f"{folder}/{first}")
        set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)
    seen = []
    for step in range(first, until):
        if step == killed_at and dist.get_rank() == 1:
            model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        seen.append(_step(model, optimiser, step, mesh))
        weights, moments = get_state_dict(model, optimiser)
        dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=f"{folder}/{step + 1}")
    return first, seen


def trained(folder: str, family: str, dimension: str) -> torch.Tensor:
    """A model after a step on a mesh, saved whole for transformers; its logits."""
    model, optimiser, mesh = _spread(dimension, family)
    _step(model, optimiser, 0, mesh)
    state = parallel.whole_state(model)
    plain = made(family, torch.float64)
    plain.load_state_dict(state)
    if dist.get_rank() == 0:
        save_checkpoint(Checkpoint(plain.config, plain, None, "a test"), folder)
    with torch.no_grad():
        return plain(_ids(1))


def accumulated(dimension: str, family: str) -> None:
    """Two batches a step, clipped: losses and norms equal one process for three steps."""
    one = made(family, torch.float64)
    its = _optimiser(one)
    model, optimiser, mesh = _spread(dimension, family)
    for ours, theirs in zip(mixtures(model), mixtures(one), strict=True):
        # Adam decays weights whose gradient is 0, not those without one.
        theirs.calls_all = ours.calls_all
    for step in range(3):
        _near(_step(model, optimiser, step, mesh), _step(one, its, step, None))
    state = parallel.whole_state(model)
    assert state.keys() == one.state_dict().keys()
    for name, theirs in one.state_dict().items():
        assert torch.allclose(state[name], theirs, rtol=1e-8, atol=1e-8), name


def mixed(dimension: str) -> None:
    """Parameters in float32, computed in bfloat16: as near to exact as one process is."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ids, mesh = _ids(0), mesh_of(dimension)
    exact, one = made("Qwen 3", torch.float64), made("Qwen 3", torch.float32).bfloat16()
    model = parallel.parallelize(made("Qwen 3", torch.float32), mesh, mp_policy=policy)
    for each in (exact, one):
        logits = each(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).to(torch.float64), ids[:, 1:].flatten()).backward()
    logits = model(parallel.shard(ids[:, :-1], mesh))
    assert logits.dtype == torch.bfloat16
    labels = parallel.shard(ids[:, 1:], mesh)
    parallel.cross_entropy(logits.double(), labels, mesh).backward()
    for (name, ours), theirs, right in zip(
        model.named_parameters(), one.parameters(), exact.parameters(), strict=True
    ):
        assert ours.dtype == ours.grad.dtype == torch.float32, name
        errors = [
            (x.double() - right.grad).norm().item() for x in (ours.grad.full_tensor(), theirs.grad)
        ]
        assert errors[0] <= 1.5 * errors[1] + 1e-3 * right.grad.norm(), f"{name}: {errors}"
