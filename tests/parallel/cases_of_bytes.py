"""Bytes that are counted where they are sent, against those that the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of
from cases_of_models import FAMILIES, W, made
from torch.distributed.tensor.debug import CommDebugMode

from polyhead import parallel
from polyhead.parallel import shards
from polyhead.planning.mesh import mesh_plan

T = 20


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends; notes (uint8) and numbers of tokens are left out."""
    sums = {"sent": 0, "summed": 0}
    N = dist.get_world_size()

    def watched(function: Callable[..., Any], count: Callable[..., int], name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            sums[name] += count(*arguments)
            return function(*arguments, **named)

        return call

    def size(x: torch.Tensor) -> int:
        return x.numel() * x.element_size() if x.dtype == torch.float32 else 0

    def p2p(op: Any, x: torch.Tensor, *_: Any) -> int:
        return size(x) if op is dist.isend else 0

    def traded(_: Any, x: torch.Tensor, __: Any = None, leaving: Any = None) -> int:
        if leaving is None:
            return size(x) * (N - 1) // N
        return size(x) * (len(x) - leaving[dist.get_rank()]) // len(x)

    counts = {
        "P2POp": (p2p, "sent"),
        "all_gather": (lambda _, x: (N - 1) * size(x), "sent"),
        "reduce_scatter": (lambda x, _: (N - 1) * size(x), "sent"),
        "all_to_all_single": (traded, "sent"),
        "all_reduce": (lambda x: 2 * (N - 1) * size(x) // N, "summed"),
    }
    fetched = {
        "_GATHER": (lambda _, x: (N - 1) * size(x), "sent"),
        "_SUM": (lambda x, _: (N - 1) * size(x), "sent"),
    }
    patches = {
        name: watched(getattr(dist, name), count, where) for name, (count, where) in counts.items()
    }
    of_shards = {
        name: watched(getattr(shards, name), count, where)
        for name, (count, where) in fetched.items()
    }
    with mock.patch.multiple(dist, **patches), mock.patch.multiple(shards, **of_shards):
        yield sums


def as_planned(what: str) -> None:
    """Forward and backward of a step."""
    dimension = "tensor" if what == "tensor" else "context"
    mesh = mesh_of(dimension)
    model = made("Llama", torch.float32)
    planned = mesh_plan(
        model.config, {dimension: dist.get_world_size()}, tokens=T, batch_size=2, weight_bits=32,
        kv_dtype="float32",
    )  # fmt: skip
    (its,) = [each for each in planned.sent if each.what == what]
    exchange = "ring" if what == "tensor" else what
    parallel.parallelize(model, mesh, exchange=exchange, training=False)  # type: ignore[arg-type]
    ids = torch.randint(W, (2, T), generator=torch.Generator().manual_seed(1))
    name = "summed" if what == "tensor" else "sent"
    with counted() as sums, CommDebugMode() as seen:
        logits = model(parallel.shard(ids, mesh))
    assert sums[name] == its.forward, f"{sums[name]} for {its.forward} forward"
    if what == "tensor":
        assert seen.get_comm_counts()[torch.ops.c10d.allreduce_] == 5  # embedding, two a layer
    with counted() as sums:
        logits.sum().backward()
    assert sums[name] == its.backward, f"{sums[name]} for {its.backward} backward"
    shares = [x.to_local() if hasattr(x, "to_local") else x for x in model.parameters()]
    held = sum(x.numel() * x.element_size() for x in shares)
    most = torch.tensor(held)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    held = int(most)  # on the fullest rank
    assert held == planned.weight_bytes, f"{held} for {planned.weight_bytes} bytes of weights"
    assert logits.shape[1] == (T if what == "tensor" else planned.tokens)


def trained_as_planned(dimension: str, family: str) -> None:
    """What torch fetches and averages in a step of training."""
    # Rows that divide: torch fills up others.
    config = replace(FAMILIES[family](), vocab_size=48)
    with mock.patch.dict(FAMILIES, {family: lambda: config}):
        model = made(family, torch.float32)
    mesh = mesh_of(dimension)
    planned = mesh_plan(
        model.config, {dimension: dist.get_world_size()}, tokens=T, batch_size=2, weight_bits=32,
        kv_dtype="float32",
    )  # fmt: skip
    parallel.parallelize(model, mesh)
    ids = torch.randint(W, (2, T), generator=torch.Generator().manual_seed(1))
    with counted() as forward:
        logits = model(ids)
    with counted() as backward:
        logits.sum().backward()
    wanted = {each.what: (each.forward, each.backward) for each in planned.sent}
    name = "sent" if dimension == "shard" else "summed"
    found = {"shard" if dimension == "shard" else "average": (forward[name], backward[name])}
    if dimension == "expert":
        del wanted["expert"]  # which depends on the tokens
    assert found == wanted, f"{found} for {wanted}"


def printed(names: list[str], size: int) -> str:
    """What a plan prints; the model is as it was."""
    mesh = mesh_of(*names, sizes=(size,))
    model = made("gpt-oss", torch.float32)
    before = {name: id(x) for name, x in model.named_parameters()}
    said = str(parallel.plan(model, mesh, tokens=T, batch_size=2))
    assert before == {name: id(x) for name, x in model.named_parameters()}
    return said
