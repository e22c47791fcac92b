"""What a rank holds at most in a step of training, against one process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases_of_attention import mesh_of

import polyhead as ph
from polyhead import parallel
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, RopeConfig

W, E = 64, 128


def _held(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def peak(step: Callable[[], Any]) -> int:
    """The most bytes that ``step`` holds beyond those before, whoever allocates them."""
    # Every tensor gets pages of its own, which go back when it is freed.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _held("VmRSS")
    step()
    return _held("VmHWM") - before


def _model(layers: int, tokens: int, window: int | None) -> ph.Transformer:
    torch.manual_seed(1)
    attention = AttentionConfig(8, 2, E // 8, rope=RopeConfig(), window=window)
    layer = LayerConfig(attention, FeedForwardConfig(3 * E))
    return ph.Transformer(ph.TransformerConfig("decoder", W, E, tokens, (layer,) * layers))


def share(tokens: int, layers: int, exchange: str, window: int | None) -> tuple[int, int]:
    """Bytes of this rank at its peak, and of one process (measured on rank 0)."""
    ids = torch.randint(W, (1, tokens + 1), generator=torch.Generator().manual_seed(2))
    one = 0
    if dist.get_rank() == 0:
        whole = _model(layers, tokens, window)

        def alone() -> None:
            logits = whole(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()

        one = peak(alone)
        del whole
    mesh = mesh_of("context")
    model = parallel.parallelize(_model(layers, tokens, window), mesh, exchange=exchange)  # type: ignore[arg-type]

    def spread() -> None:
        logits = model(parallel.shard(ids[:, :-1], mesh))
        parallel.cross_entropy(logits, parallel.shard(ids[:, 1:], mesh), mesh).backward()

    return peak(spread), one


def _over(mesh: Any, exchange: Any, *x: torch.Tensor, **more: Any) -> Any:
    return parallel.attention(*x, mesh, exchange=exchange, **more)


def share_of_attention(tokens: int, exchange: str) -> tuple[int, int]:
    """As ``share``, of one attention alone, its queries, keys and values included."""
    H, G, D = 16, 2, 32
    mask = ph.Causal() & ph.Window(256)

    def step(count: int, attend: Callable[..., Any]) -> None:
        shapes = ((1, heads, count, D) for heads in (H, G, G))
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        attend(q, k, v, mask=mask).square().sum().backward()

    one = peak(lambda: step(tokens, ph.attention)) if dist.get_rank() == 0 else 0
    mesh = mesh_of("context")
    count = tokens // mesh.size()
    return peak(lambda: step(count, partial(_over, mesh, exchange))), one
