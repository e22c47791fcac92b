"""Calls that one rank makes differently from the others, and processes that are gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of

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


def nothing() -> None:
    """Says that this process has started."""
