"""Calls that one rank makes differently from the others, and processes that are gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of
from cases_of_models import batch, made, mesh_named

import polyhead as ph
from polyhead import parallel


def differs(what: str) -> None:
    """Rank 1 makes another call."""
    odd = dist.get_rank() == 1
    tokens = 16 if odd and what == "tokens" else 19
    heads = 2 if odd and what == "heads" else 4
    q = torch.randn(1, heads, tokens, 8)
    k, v = (torch.randn(1, 2, 19, 8) for _ in range(2))
    if odd and what == "dtype":
        q = q.double()
    mask = ph.Window(3) if odd and what == "mask" else ph.Causal()
    parallel.attention(q, k, v, mesh_of("context"), mask=mask)


def odd_heads() -> None:
    x = torch.randn(1, 3, 8, 8)
    parallel.attention(x, x, x, mesh_of("context"), exchange="heads")


def dies(number: int) -> Any:
    """Rank ``number`` is killed in the middle of a run of attentions."""
    x = torch.randn(1, 2, 8, 8)
    for step in range(3):
        if step == 2 and dist.get_rank() == number:
            os.kill(os.getpid(), signal.SIGKILL)
        parallel.attention(x, x, x, mesh_of("context"))


def dies_in_a_step(dimension: str, family: str, number: int) -> None:
    """Rank ``number`` is killed between the forward and the backward pass of the second step."""
    mesh = mesh_of(dimension)
    model = parallel.parallelize(made(family, torch.float32), mesh)
    ids = batch(family)[0]
    for step in range(3):
        if step == 1 and dist.get_rank() == number:
            model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        model(parallel.shard(ids, mesh)).sum().backward()


def differs_on_a_mesh(what: str, number: int) -> None:
    """One rank of two dimensions makes another call, or one that is refused."""
    odd = dist.get_rank() == number
    mesh = mesh_named("tensor + context")
    exchange = "rings" if odd and what == "argument" else "ring"
    model = parallel.parallelize(made("Llama", torch.float32), mesh, exchange=exchange)  # type: ignore[arg-type]
    ids = batch("Llama")[0]
    if odd and what == "id":
        ids = ids + 40
    if odd and what == "length":
        ids = ids[:, :-4]
    if odd and what == "tokens":
        ids = ids.flip(1)
    model(parallel.shard(ids, mesh))


def nothing() -> None:
    """Says that this process has started."""
