"""Launches the kernels of ``device/`` over tensors: what ``kernels.operators.Code`` asks for.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.triton import blocks
from polyhead.kernels.triton.device import backward, forward
from polyhead.kernels.triton.device import merge as merging
from polyhead.kernels.triton.interpreting import interpreting
from polyhead.kernels.triton.launching import launch_kernel, on_device
from polyhead.native.arguments import KVSegment, ScoreMods
from polyhead.semantics.sources import are_first_features

_LOG2E = 1.4426950408889634


def attend(
    q: Tensor, segments: Sequence[KVSegment], scale: float, mods: ScoreMods, *, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention over all segments: out ``[B, H, T, V]`` in q's dtype, lse ``[B, H, T]`` float32."""
    B, H, T, D = q.shape
    G, V = segments[0].k.shape[1], segments[0].value_dim
    parts = blocks.parts_of(D, V)
    coded = any(segment.coding is not None for segment in segments)
    rows, kept = T * (H // G), mods.keep is not None
    tiles = blocks.forward_tiles(
        _table(q.device), parts, q.itemsize, rows, busy=_busy(mods), kept=kept, coded=coded
    )
    programs = -(-T * (H // G) // tiles.rows) * B * G
    cuts = [
        blocks.splits_of(programs, segment.length, tiles.keys, _processors(q.device))
        for segment in segments
    ]
    slots = sum(splits for splits, _ in cuts)
    out = q.new_empty(B, H, T, V)
    found = q.new_empty((B, H, T), dtype=torch.float32)
    outs, lses = out[None], found[None]
    if slots > 1:
        outs = q.new_empty((slots, B, H, T, V), dtype=torch.float32)
        lses = q.new_empty((slots, B, H, T), dtype=torch.float32)
    slot = column = 0
    with on_device(q.device):
        for segment, (splits, share) in zip(segments, cuts, strict=True):
            names = _arguments(q, segment, mods, column, parts, scale)
            names |= {
                "q": _rows(q), **_keys_and_values(segment),
                "pages": None if segment.pages is None
                else (segment.pages, segment.pages.stride(0), segment.k.shape[2]),
                "out": (outs[slot:], *outs.stride()[:4]),
                "lse": (lses[slot:], *lses.stride()),
                "split_keys": share, "skipped": segment.skipped * segment.unit,
                "PAGED": segment.pages is not None,
                "SHARED": parts.head == parts.value == V
                and are_first_features(segment.v, segment.k),
            }  # fmt: skip
            launch_kernel(
                forward.attend, (programs, splits), q, **names, ROWS=tiles.rows, KEYS=tiles.keys,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            slot, column = slot + splits, column + segment.length
        if slots > 1:
            launch_kernel(
                merging.merge, (B * H * T,), q,
                (outs, outs.stride(0), outs.stride(3)), (lses, lses.stride(0)), _rows(out),
                (found, *found.stride()), H, T, slots,
                SPLITS=blocks.power_above(slots), VALUE=parts.value, VALUE_DIM=V,
            )  # fmt: skip
    return out, found if lse else None


def gradients(
    q: Tensor,
    segment: KVSegment,
    scale: float,
    mods: ScoreMods,
    result: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    *,
    of_bias: bool,
) -> list[Tensor]:
    """Gradients of q, k and v, and of the bias in float32 if asked for."""
    B, H, T, D = q.shape
    G, S, V = segment.k.shape[1], segment.k.shape[2], segment.value_dim
    (out, lse), (grad_out, grad_lse) = result, grads
    # A row has no gradients if it saw nothing, or saw content that is not finite.
    no_grad_rows = lse.isneginf()
    if mods.bounds is not None or mods.keep is not None:
        no_grad_rows = no_grad_rows | out.isnan().any(dim=-1)
    delta = (grad_out.float() * out.float()).sum(dim=-1) - grad_lse
    delta = delta.masked_fill(no_grad_rows, 0.0).contiguous()
    lse = (lse * _LOG2E).masked_fill(no_grad_rows, torch.inf).contiguous()
    d_q, d_k, d_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, segment.k, segment.v)
    )
    table = _table(q.device)
    parts = blocks.gradient_parts(table, blocks.parts_of(D, V))
    tiles, for_queries = blocks.gradient_tiles(table, parts, q.itemsize, busy=_busy(mods))
    names = _arguments(q, segment, mods, 0, parts, scale)
    masked = names["KEEP"] or names["BOUNDS"] != ""
    names |= {
        "q": _rows(q), "k": _rows(segment.k), "v": _rows(segment.v), "grad": _rows(grad_out),
        "lse": lse, "delta": delta, "heads": H, "MASKED": masked,
    }  # fmt: skip
    spans = None
    if names["BOUNDS"] == "indexes":
        low, high, _ = names["bounds"]
        of_blocks = _spans(low, high, S, tiles.keys)
        spans = of_blocks, of_blocks.stride(0) if len(of_blocks) > 1 else 0
    learned = mods.learned if of_bias else None
    d_bias, sums = _bias_sums(mods, learned, lse)
    shared = mods.bias is not None and mods.bias.shape != (B, H, T, S)
    with on_device(q.device):
        launch_kernel(
            backward.keys_pass, (-(-S // tiles.keys) * B * G,), q,
            **names, d_k=_rows(d_k), d_v=_rows(d_v), spans=spans, ROWS=tiles.rows, KEYS=tiles.keys,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        programs = -(-T * (H // G) // for_queries.rows) * B * G
        launch_kernel(
            backward.queries_pass, (programs,), q, **names, d_q=_rows(d_q), d_bias=d_bias,
            LEARNS=learned is not None, SHARED=shared, ROWS=for_queries.rows, KEYS=for_queries.keys,
            num_warps=for_queries.warps, num_stages=for_queries.stages,
        )  # fmt: skip
    if learned is None:
        return [d_q, d_k, d_v]
    return [d_q, d_k, d_v, _gradient_of_bias(mods, sums)]


def _arguments(
    q: Tensor,
    segment: KVSegment,
    mods: ScoreMods,
    column: int,
    parts: blocks.Parts,
    scale: float,
) -> dict[str, Any]:
    """Arguments that forward and backward passes share, by name.

    Args:
        q: Tokens of the queries.
        segment: The keys and values.
        mods: What joins the softmax.
        column: Index of the segment's first key in the call.
        parts: The powers of two that hold a key and a value.
        scale: Factor of the scores.
    """
    H, G, S = q.shape[1], segment.k.shape[1], segment.length
    columns = slice(column, column + S)
    bias: Any = None
    kind = ""
    if mods.slopes is not None:
        bias, kind = (mods.slopes,), "slopes"
    elif mods.by_distance is not None:
        bias, kind = (mods.by_distance, mods.by_distance.shape[1] // 2), "by_distance"
    elif mods.bias is not None:
        bias, kind = _pairs(mods.bias, columns), "tensor"
    bounds, bounded = _bounds(mods, segment)
    dropout = mods.dropout
    return {
        "tokens": q.shape[2], "keys": S, "kv_heads": G, "first": segment.first,
        "scale": scale, "cap": mods.softcap or 1.0,
        "factor": 1.0 if dropout is None else 1.0 / (1.0 - dropout.p),
        "bounds": bounds,
        "keep": None if mods.keep is None else _pairs(mods.keep.view(torch.uint8), columns),
        "q_positions": None if mods.q_positions is None else _per_row(mods.q_positions),
        "k_positions": None if segment.positions is None else _per_row(segment.positions),
        "bias": bias,
        "dropout": None if dropout is None
        else (dropout.seed, _least(dropout.p), H, dropout.query, dropout.key + column),
        "HEAD": parts.head, "TAIL": parts.tail, "VALUE": parts.value, "DIM": q.shape[3],
        "VALUE_DIM": segment.value_dim, "GROUP": H // G, "BOUNDS": bounded,
        "KEEP": mods.keep is not None, "BIAS": kind, "CAP": bool(mods.softcap),
        "DROPOUT": dropout is not None, "POSITIONS": segment.positions is not None,
        "WIDE": interpreting() and q.dtype == torch.bfloat16,
    }  # fmt: skip


def _keys_and_values(segment: KVSegment) -> dict[str, Any]:
    """Keys and values of a segment by name, and what their codes stand for, if they are codes."""
    coding = segment.coding
    if coding is None:
        plain = {"k": _rows(segment.k), "v": _rows(segment.v)}
        return plain | {"K_CODES": None, "V_CODES": None}
    coding.check(segment.k, segment.v)
    of_keys = coding.k_bits, coding.group, 0, coding.key_dim
    k = *_rows(segment.k), coding.k_scale, *_rows(coding.k_zero)
    if coding.v_scale is None or coding.v_zero is None:
        return {"k": k, "v": k, "K_CODES": of_keys, "V_CODES": of_keys}
    v = *_rows(segment.v), coding.v_scale, *_rows(coding.v_zero)
    of_values = coding.v_bits, coding.group, coding.value_group, coding.value_dim
    return {"k": k, "v": v, "K_CODES": of_keys, "V_CODES": of_values}


def _bounds(mods: ScoreMods, segment: KVSegment) -> tuple[tuple[Tensor, Tensor, int] | None, str]:
    """Low and high of the keys that each query sees, and of what: indexes or positions."""
    if mods.bounds is None:
        return None, ""
    low, high = mods.bounds
    rows = low.stride(0) if len(low) > 1 else 0
    if segment.positions is not None:
        return (low, high, rows), "positions"
    # Clamped before they are moved: the ends of int64 would overflow.
    ends = segment.first, segment.first + segment.length
    low, high = ((bound.clamp(*ends) - segment.first).int() for bound in (low, high))
    return (low, high, rows), "indexes"


def _spans(low: Tensor, high: Tensor, keys: int, tile: int) -> Tensor:
    """``[1 or B, blocks of keys, 2]`` the first query that sees a block, and the end of them.

    Queries are taken 64 at a time, so the ends are those of such runs.
    """
    run, T = 64, low.shape[1]
    index = torch.arange(-(-T // run) * run, device=low.device).clamp(max=T - 1)
    least = low[:, index].view(len(low), -1, 1, run).amin(dim=-1)
    most = high[:, index].view(len(low), -1, 1, run).amax(dim=-1)
    starts = torch.arange(0, keys, tile, device=low.device)
    touches = ((least < starts + tile) & (most > starts)).mT.to(torch.uint8)
    runs = touches.shape[-1]
    first, last = touches.argmax(dim=-1), runs - touches.flip(-1).argmax(dim=-1)
    some = touches.amax(dim=-1)
    return torch.stack((first * some * run, (last * some * run).clamp(max=T)), dim=-1).int()


def _bias_sums(mods: ScoreMods, learned: Tensor | None, rows: Tensor) -> tuple[Any, list[Tensor]]:
    """Zeros that the gradient of a bias is added to, as the kernel takes them and as tensors."""
    if learned is None:
        return None, []
    if mods.bias is None:
        sums = [torch.zeros_like(rows)]
        if mods.by_distance is not None:
            table = torch.zeros(learned.shape, dtype=torch.float32, device=learned.device)
            sums = [table, *sums, torch.zeros_like(rows)]
        return tuple(sums), sums
    sums = [torch.zeros(learned.shape, dtype=torch.float32, device=learned.device)]
    return _pairs(sums[0], slice(None)), sums


def _gradient_of_bias(mods: ScoreMods, sums: list[Tensor]) -> Tensor:
    if mods.slopes is not None:
        return sums[0].sum(dim=(0, 2))
    if mods.by_distance is not None:
        table, first, last = sums
        table[:, 0] += first.sum(dim=(0, 2))
        table[:, -1] += last.sum(dim=(0, 2))
    return sums[0]


def _busy(mods: ScoreMods) -> bool:
    return mods.learned is not None or mods.dropout is not None


def _rows(x: Tensor) -> tuple[Any, ...]:
    """A 4-D tensor and its strides but the last, which is 1."""
    return (x, *x.stride()[:3])


def _pairs(x: Tensor, columns: slice) -> tuple[Any, ...]:
    """Some columns of a tensor that broadcasts to ``[B, H, T, S]``, and its strides."""
    x = x if x.shape[3] == 1 else x[..., columns]
    return (x, *(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)))


def _per_row(x: Tensor) -> tuple[Tensor, int]:
    """``[n]`` or ``[1 or B, n]`` and its stride by batch row."""
    return x, x.stride(0) if x.ndim == 2 and len(x) > 1 else 0


def _least(p: float) -> int:
    """The least of the 2²⁴ numbers of the hash that is kept: number / 2²⁴ ≥ p in float32."""
    return math.ceil(torch.tensor(p, dtype=torch.float32, device="cpu").item() * (1 << 24))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _table(device: torch.device) -> blocks.Table:
    if device.type != "cuda":
        return blocks.table_of((9, 0))
    return blocks.table_of(torch.cuda.get_device_capability(device))
