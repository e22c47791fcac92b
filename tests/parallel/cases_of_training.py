"""Training over ranks: accumulated, clipped, saved in shares, resumed on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cases_of_attention import mesh_of
from cases_of_models import W, made
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import polyhead as ph
from polyhead import parallel


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


def _spread(dimension: str) -> tuple[ph.Transformer, Any, Any]:
    model = parallel.parallelize(made("Qwen 3", torch.float64), mesh_of(dimension))
    return model, _optimiser(model), mesh_of(dimension)


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
