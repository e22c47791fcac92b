"""The oracle: attention and its gradients in float64 NumPy, from the formula, without the package.

    z = softcap(q kᵀ · scale) + bias      p = exp(z − lse)      out = (p ∘ keep / (1 − rate)) v
    lse = log(Σ exp z [+ exp sink])       over the visible keys; nothing visible: out 0, lse −∞

Everything is dense and nothing is clever. ``rounded`` is the same formula in torch, every step
rounded to the dtype of its inputs: its distance from the oracle is the error that a dtype costs,
and twice that is what a kernel may err (the error budget of docs/architecture.md).

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Problem:
    """An attention with everything drawn out: arrays of float64, bools of shape [B, H, T, S]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray
    bias: np.ndarray | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    keep: np.ndarray | None = None
    rate: float = 0.0


def attend(problem: Problem) -> dict[str, Any]:
    """``out``, ``lse``, ``weights`` (before dropout) and what ``gradients`` needs."""
    x = problem
    groups = x.q.shape[1] // x.k.shape[1]
    k, v = (np.repeat(t, groups, axis=1) for t in (x.k, x.v))
    scale = 1.0 / math.sqrt(x.q.shape[-1]) if x.scale is None else x.scale
    z = np.einsum("bhtd,bhsd->bhts", x.q, k) * scale
    slope = np.ones_like(z)
    if x.softcap is not None:
        slope = 1.0 - np.tanh(z / x.softcap) ** 2
        z = x.softcap * np.tanh(z / x.softcap)
    if x.bias is not None:
        z = z + x.bias
    z = np.where(x.visible, z, -np.inf)
    columns = z
    if x.sinks is not None:
        sink = np.broadcast_to(x.sinks[None, :, None, None], (*z.shape[:3], 1))
        columns = np.concatenate([z, sink], axis=-1)
    if columns.shape[-1]:
        peak = np.max(columns, axis=-1, keepdims=True)
    else:
        peak = np.full((*z.shape[:3], 1), -np.inf)
    safe = np.where(np.isneginf(peak), 0.0, peak)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(np.exp(columns - safe).sum(axis=-1, keepdims=True))
    weights = np.where(np.isneginf(lse), 0.0, np.exp(z - np.where(np.isneginf(lse), 0.0, lse)))
    factor = np.ones_like(weights) if x.keep is None else x.keep / (1.0 - x.rate)
    out = np.einsum("bhts,bhsv->bhtv", weights * factor, v)
    return {
        "out": out,
        "lse": lse[..., 0],
        "weights": weights,
        "factor": factor,
        "slope": slope,
        "k": k,
        "v": v,
        "scale": scale,
    }


def gradients(problem: Problem, d_out: np.ndarray, d_lse: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of Σ d_out ∘ out + Σ d_lse ∘ lse by q, k, v, the drawn-out bias and the sinks."""
    x, s = problem, attend(problem)
    B, H, _, _ = x.q.shape
    G = x.k.shape[1]
    weights, factor = s["weights"], s["factor"]
    d_weights = np.einsum("bhtv,bhsv->bhts", d_out, s["v"]) * factor
    mean = (d_weights * weights).sum(axis=-1, keepdims=True)
    d_lse = np.where(np.isneginf(s["lse"]), 0.0, d_lse)[..., None]
    d_z = weights * (d_weights - mean + d_lse)
    d_raw = d_z * s["slope"] * s["scale"]
    d_k = np.einsum("bhts,bhtd->bhsd", d_raw, x.q)
    d_v = np.einsum("bhts,bhtv->bhsv", weights * factor, d_out)
    found = {
        "q": np.einsum("bhts,bhsd->bhtd", d_raw, s["k"]),
        "k": d_k.reshape(B, G, H // G, *d_k.shape[2:]).sum(axis=2),
        "v": d_v.reshape(B, G, H // G, *d_v.shape[2:]).sum(axis=2),
        "bias": d_z,
    }
    if x.sinks is not None:
        sink_weight = np.exp(x.sinks[None, :, None, None] - s["lse"][..., None])
        found["sinks"] = (sink_weight * (d_lse - mean)).sum(axis=(0, 2, 3))
    return found


def magnitudes(problem: Problem, d_out: np.ndarray, d_lse: np.ndarray) -> dict[str, np.ndarray]:
    """The sum of the absolute terms behind ``out`` and every gradient.

    Rounding errs by ulps of the terms, not of their sum, which may cancel.
    """
    x, s = problem, attend(problem)
    B, H, _, _ = x.q.shape
    G = x.k.shape[1]
    weights = s["weights"]
    d_weights = np.einsum("bhtv,bhsv->bhts", np.abs(d_out), np.abs(s["v"])) * s["factor"]
    inner = (d_weights * weights).sum(axis=-1, keepdims=True) + np.abs(d_lse)[..., None]
    d_z = weights * (d_weights + inner)
    d_raw = d_z * s["slope"] * abs(s["scale"])
    d_k = np.einsum("bhts,bhtd->bhsd", d_raw, np.abs(x.q))
    d_v = np.einsum("bhts,bhtv->bhsv", weights * s["factor"], np.abs(d_out))
    found = {
        "out": np.einsum("bhts,bhsv->bhtv", weights * s["factor"], np.abs(s["v"])),
        "q": np.einsum("bhts,bhsd->bhtd", d_raw, np.abs(s["k"])),
        "k": d_k.reshape(B, G, H // G, *d_k.shape[2:]).sum(axis=2),
        "v": d_v.reshape(B, G, H // G, *d_v.shape[2:]).sum(axis=2),
        "bias": d_z,
    }
    if x.sinks is not None:
        sinks, lse = x.sinks[None, :, None, None], s["lse"][..., None]
        # Rounding an exponent is a share of the weight; its two terms are rounded once, and not
        # some dozen times as other terms are.
        exponent = (np.abs(sinks) + np.abs(np.where(np.isneginf(lse), 0.0, lse))) / 16
        found["sinks"] = (np.exp(sinks - lse) * (1 + exponent) * inner).sum(axis=(0, 2, 3))
    return found


def rounded(
    problem: Problem, leaves: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch with every step rounded to ``dtype``, by autograd differentiable.

    Args:
        problem: For its mask, scale, softcap and dropout.
        leaves: ``q``, ``k``, ``v`` and, where there are any, ``bias`` (drawn out) and ``sinks``.
        dtype: Of every step.
    """
    x = problem
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scale = 1.0 / math.sqrt(q.shape[-1]) if x.scale is None else x.scale
    z = (q @ k.mT) * scale
    if x.softcap is not None:
        z = torch.tanh(z / x.softcap) * x.softcap
    if "bias" in leaves:
        z = z + leaves["bias"]
    visible = torch.from_numpy(np.ascontiguousarray(x.visible))
    empty = ~visible.any(dim=-1, keepdim=True)
    columns = z.masked_fill(~visible, -torch.inf)
    if "sinks" in leaves:
        sink = leaves["sinks"].to(dtype)[None, :, None, None].expand(*z.shape[:3], 1)
        columns = torch.cat([columns, sink], dim=-1)
    else:
        columns = columns.masked_fill(empty, 0.0)
    lse = torch.logsumexp(columns, dim=-1)
    weights = torch.softmax(columns, dim=-1)[..., : z.shape[-1]].masked_fill(~visible, 0.0)
    if x.keep is not None:
        weights = weights * torch.from_numpy(x.keep).to(dtype) / (1.0 - x.rate)
    if "sinks" not in leaves:
        lse = lse.masked_fill(empty[..., 0], -torch.inf)
    return weights @ v, lse


def dropout_keep(seed: int, rate: float, B: int, H: int, T: int, S: int, shift: int) -> np.ndarray:
    """The dropout that the documentation promises: a hash of (seed, row, query, key) places."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x & np.uint64(0xFFFFFFFF)
        for _ in range(2):
            x = ((x >> np.uint64(16)) ^ x) * np.uint64(0x45D9F3B) & np.uint64(0xFFFFFFFF)
        return (x >> np.uint64(16)) ^ x

    rows = mix((seed + np.arange(B * H)).astype(np.uint64)).reshape(B, H, 1, 1)
    queries = (np.arange(T) + shift).astype(np.int64).view(np.uint64)[:, None]
    keys = np.arange(S, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = mix(mix(rows + queries) + keys)
    return (mixed & np.uint64(0xFFFFFF)).astype(np.float32) / np.float32(1 << 24) >= np.float32(
        rate
    )


def alibi(slopes: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray) -> np.ndarray:
    """``[B, H, T, S]`` from positions ``[B, T]`` and ``[B, S]``."""
    apart = np.abs(q_positions[:, None, :, None] - k_positions[:, None, None, :])
    return -slopes[None, :, None, None] * apart


def t5_buckets(
    q_positions: np.ndarray,
    k_positions: np.ndarray,
    count: int,
    *,
    bidirectional: bool,
    max_distance: int,
) -> np.ndarray:
    """``[B, T, S]`` T5's bucket of every pair, one pair at a time."""

    def bucket(ahead: int) -> int:
        first, n = 0, count
        if bidirectional:
            n //= 2
            first = n if ahead > 0 else 0
            apart = abs(ahead)
        else:
            apart = max(-ahead, 0)
        exact = n // 2
        if apart < exact:
            return first + apart
        # T5 computes this in float32.
        log = np.log(np.float32(apart) / np.float32(exact), dtype=np.float32)
        far = log / np.float32(math.log(max_distance / exact)) * np.float32(n - exact)
        return first + min(exact + int(far), n - 1)

    ahead = k_positions[:, None, :] - q_positions[:, :, None]
    known = {int(d): bucket(int(d)) for d in np.unique(ahead)}
    return np.vectorize(known.__getitem__, otypes=[np.int64])(ahead)


def content_columns(
    q_positions: np.ndarray, k_positions: np.ndarray, count: int, max_distance: int | None
) -> np.ndarray:
    """``[B, T, S]`` the column of every pair in tables of content, one pair at a time."""

    def column(apart: int) -> int:
        exact, far = count // 4, abs(apart)
        if max_distance is not None and far > exact:
            # DeBERTa computes this in float32.
            log = np.log(np.float32(far) / np.float32(exact), dtype=np.float32)
            share = log / np.log(np.float32((max_distance - 1) / exact), dtype=np.float32)
            apart = int(math.copysign(exact + math.ceil(share * np.float32(exact - 1)), apart))
        return min(max(apart + count // 2, 0), count - 1)

    apart = q_positions[:, :, None] - k_positions[:, None, :]
    known = {int(d): column(int(d)) for d in np.unique(apart)}
    return np.vectorize(known.__getitem__, otypes=[np.int64])(apart)


def content_bias(
    of_query: torch.Tensor | None, of_key: torch.Tensor | None, columns: np.ndarray, heads: int
) -> torch.Tensor:
    """``[B, H, T, S]`` of tables ``[1 or B, 1 or H, tokens, n]``."""
    B, T, S = columns.shape
    b, h, i, j = np.ix_(range(B), range(heads), range(T), range(S))
    found = 0.0
    for table, token in ((of_query, i), (of_key, j)):
        if table is not None:
            table = table.expand(B, heads, -1, -1)
            found = found + table[b, h, token, columns[:, None]]
    return found
