"""Launches the recurrence's kernels: ``device/recurrence`` tells how they work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.triton import blocks
from polyhead.kernels.triton.device import recurrence as device
from polyhead.kernels.triton.launching import launch_kernel, on_device
from polyhead.kernels.triton.self_test import States
from polyhead.semantics.recurrence_call import RecurrenceCall

FEW = 16
"""Up to so many tokens a state goes from token to token."""


def recur(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    """``out [B, H, T, V]`` in q's dtype and the last state; that of a call in place itself."""
    q, k, v, H, state = call.q, call.k, call.v, call.heads, call.state
    B, _, T, K = q.shape
    V = v.shape[3]
    decay = States.of(call).decay
    tiles = blocks.state_tiles(K, V, by_feature=decay == "feature")
    out = q.new_empty(B, H, T, V)
    last = state
    if last is None or not call.in_place:
        last = q.new_empty((B, H, K, V), dtype=torch.float32)
    given: dict[str, Any] = {
        "q": _shared(q, H), "k": _shared(k, H), "decay": _decay(call),
        "beta": None if call.beta is None else _strided(call.beta),
        "real": None if call.real is None else _strided(call.real.view(torch.uint8)),
        "tokens": T, "heads": H, "scale": call.scale, "KEY_DIM": K,
        "DECAY": decay, "BETA": call.beta is not None, "DELTA": call.delta,
        "REAL": call.real is not None,
    }  # fmt: skip
    states = {
        "v": _shared(v, H), "state": None if state is None else _strided(state),
        "last": _strided(last), "out": (out, *out.stride()[:3]),
        "STATE": state is not None, "VALUE_DIM": V,
    }  # fmt: skip
    with on_device(q.device):
        if T <= FEW:
            launch_kernel(
                device.steps, (B * H, -(-V // tiles.value)), q, **given, **states,
                KEY=tiles.key, VALUE=tiles.value, num_warps=4, num_stages=1,
            )  # fmt: skip
            return out, last
        count = -(-T // tiles.chunk)
        pairs = q.new_empty((B, H, count, tiles.chunk, tiles.chunk), dtype=torch.float32)
        given |= {
            "pairs": pairs, "solved": torch.empty_like(pairs) if call.delta else None,
            "count": count, "CHUNK": tiles.chunk,
        }  # fmt: skip
        width = tiles.decayed if decay == "feature" else tiles.part
        launch_kernel(
            device.chunk_pairs, (B * H * count,), q, **given, WIDTH=width,
            PARTS=tiles.key // width, num_warps=4, num_stages=1,
        )  # fmt: skip
        launch_kernel(
            device.chunks, (B * H, -(-V // tiles.chunk_value)), q, **given, **states,
            WIDTH=tiles.part, PARTS=tiles.key // tiles.part, VALUE=tiles.chunk_value,
            num_warps=8, num_stages=1,
        )  # fmt: skip
    return out, last


def _shared(x: Tensor, heads: int) -> tuple[Any, ...]:
    """A tensor of tokens, its strides but the last, which is 1, and how many heads share one."""
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    return (x, *x.stride()[:3], heads // x.shape[1])


def _strided(x: Tensor) -> tuple[Any, ...]:
    return (x, *x.stride())


def _decay(call: RecurrenceCall) -> tuple[Any, ...] | None:
    decay = call.decay
    if decay is None:
        return None
    if decay.ndim == 1:
        return decay, 0, decay.stride(0), 0
    return _shared(decay, call.heads) if decay.ndim == 4 else _strided(decay)
