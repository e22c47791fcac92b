"""Attention in tiles with an online softmax: every feature, O(T) memory, any device, pure PyTorch.

FlashAttention's recurrence (Dao et al. 2022; Milakov & Gimelshein 2018). A block of queries goes
over the keys a tile at a time and keeps, per row, the running maximum m, the sum l of exp(score − m)
and the weighted values acc:

    m' = max(m, max score)     α = exp(m − m')     l ← α l + Σ exp(score − m')     acc ← α acc + P V
    out = acc / l              lse = m + log l

The backward pass recomputes each tile's weights from lse (Dao 2023, algorithm 2):

    P = exp(score − lse)     dP = dO Vᵀ     dS = P ∘ (dP − rowsum(dO ∘ O) + dlse)
    dV = Pᵀ dO               dQ = scale · dS K            dK = scale · dSᵀ Q

Tiles that the mask empties are skipped. The heads of a group are rows of one product (``fold``),
so K and V are never expanded. Shape letters: B batch, H query heads, G kv heads, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.base import Kernel
from polyhead.semantics import Call, DenseSource, KeyValueSource, State, Tokens, Visibility
from polyhead.semantics.call import Specification
from polyhead.semantics.scores import (
    accumulation_dtype,
    fold,
    keep_weights,
    poisoned,
    quarantine,
    tile_scores,
    unfold,
)

SCORES_PER_TILE = 1 << 21
"""Scores held at a time (8 MiB in float32): large enough for matrix products to run at their rate,
small enough to stay near the processor."""


class TiledKernel(Kernel):
    name = "tiled"
    summary = "online softmax over tiles in pure PyTorch; every feature, O(T) memory, any device"

    def refusal(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> State:
        if not call.requires_grad:
            out, lse = _forward(call.q, call.source, call.spec, call.q_tokens)
            return State(out, lse)
        k, v = call.source.gather()
        bias = None if call.spec.bias is None else call.spec.bias.tensor
        out, lse = _Tiled.apply(  # type: ignore[no-untyped-call]
            call.q, k, v, bias, call.spec, call.q_tokens, call.source.tokens
        )
        return State(out, lse)


def _tile_sizes(q: Tensor, keys: int) -> tuple[int, int]:
    """Queries and keys per tile."""
    heads = q.shape[0] * q.shape[1]
    area = max(1, SCORES_PER_TILE // max(1, heads))
    rows = min(q.shape[2], max(16, 1 << int(math.log2(area) / 2)))
    return max(1, rows), max(64, min(keys, area // max(1, rows)))


def _tiles(
    spec: Specification, rows: Tokens, tiles: list[Tokens]
) -> Iterator[tuple[Tokens, Visibility]]:
    """The tiles that a block of queries sees anything of."""
    for tile in tiles:
        kind = Visibility.ALL if spec.mask is None else spec.mask.classify(rows, tile)
        if kind is not Visibility.NONE:
            yield tile, kind


def _forward(
    q: Tensor, source: KeyValueSource, spec: Specification, q_tokens: Tokens
) -> tuple[Tensor, Tensor]:
    row_size, tile_size = _tile_sizes(q, source.tokens.length)
    tiles = source.tiles(tile_size)
    blocks = [_forward_block(q, source, spec, rows, tiles) for rows in q_tokens.split(row_size)]
    if not blocks:
        precise = accumulation_dtype(q.dtype)
        return q.new_empty(*q.shape[:3], source.value_dim), q.new_empty(q.shape[:3], dtype=precise)
    outs, lses = zip(*blocks, strict=True)
    if len(blocks) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _forward_block(
    q: Tensor, source: KeyValueSource, spec: Specification, rows: Tokens, tiles: list[Tokens]
) -> tuple[Tensor, Tensor]:
    """``out [B, H, rows, V]`` and ``lse [B, H, rows]`` of one block of queries."""
    H, G = q.shape[1], source.num_kv_heads
    precise = accumulation_dtype(q.dtype)
    q_BHTD = _rows_of(q, rows).to(precise)
    peak = total = acc = spoiled = None
    for tile, kind in _tiles(spec, rows, tiles):
        k, v = source.read(tile)
        k, v = k.to(precise), v.to(precise)
        bad = None
        if kind is Visibility.SOME:
            k, v, bad = quarantine(k, v)
        scores, _, visible = tile_scores(q_BHTD, k, spec, rows, tile)
        if bad is not None:
            now_spoiled = poisoned(visible, bad, H)
            spoiled = now_spoiled if spoiled is None else spoiled | now_spoiled
        tile_peak = scores.amax(dim=-1)
        new_peak = tile_peak if peak is None else torch.maximum(peak, tile_peak)
        # Where nothing has been seen yet the peak is −∞; measure against 0 to keep NaN out.
        safe_peak = new_peak.masked_fill(new_peak.isneginf(), 0.0)
        weights = scores.sub_(safe_peak[..., None]).exp_()
        tile_total = weights.sum(dim=-1)
        if spec.dropout_p:
            weights = weights * keep_weights(spec, weights.shape, rows, tile)
        tile_acc = unfold(fold(weights, G) @ v, H)
        if peak is None or total is None or acc is None:
            total, acc = tile_total, tile_acc
        else:
            rescale = torch.exp(peak - safe_peak)
            total = total * rescale + tile_total
            acc = acc.mul_(rescale[..., None]).add_(tile_acc)
        peak = new_peak
    if peak is None or total is None or acc is None:
        out = q.new_zeros(*q_BHTD.shape[:3], source.value_dim)
        return out, q_BHTD.new_full(q_BHTD.shape[:3], -torch.inf)
    some = torch.where(total == 0, 1.0, total)
    out = acc / (some * (1.0 - spec.dropout_p))[..., None]
    if spoiled is not None:
        out = out.masked_fill(spoiled[..., None], torch.nan)
    return out.to(q.dtype), peak + torch.log(some)


def _rows_of(x: Tensor, rows: Tokens) -> Tensor:
    """The rows of a block, ``[B, H, rows, …]``."""
    return x[:, :, rows.start : rows.start + rows.length]


class _Tiled(torch.autograd.Function):
    """The tiled forward pass with its own backward pass, which stores q, k, v, out and lse only."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        spec: Specification,
        q_tokens: Tokens,
        k_tokens: Tokens,
    ) -> tuple[Tensor, Tensor]:
        return _forward(q, _source(k, v, k_tokens), _with_bias(spec, bias), q_tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, ctx.spec, ctx.q_tokens, ctx.k_tokens = inputs
        out, lse = output
        ctx.save_for_backward(q, k, v, bias, out, lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, lse = ctx.saved_tensors
        spec = _with_bias(ctx.spec, bias)
        needs_bias = ctx.needs_input_grad[3]
        pieces = _backward(
            (q, k, v, out, lse), grads, spec, ctx.q_tokens, ctx.k_tokens, needs_bias=needs_bias
        )
        return (*pieces, None, None, None)


def _source(k: Tensor, v: Tensor, tokens: Tokens) -> DenseSource:
    source = DenseSource(k, v)
    source.tokens = tokens
    return source


def _with_bias(spec: Specification, bias: Tensor | None) -> Specification:
    """The specification whose bias is computed from the tensor that autograd handed over."""
    if bias is None or spec.bias is None:
        return spec
    return Specification(
        scale=spec.scale,
        mask=spec.mask,
        bias=spec.bias.with_tensor(bias),
        softcap=spec.softcap,
        dropout_p=spec.dropout_p,
        seed=spec.seed,
    )


def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, ...],
    spec: Specification,
    q_tokens: Tokens,
    k_tokens: Tokens,
    *,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the bias's tensor."""
    q, k, v, out, lse = saved
    grad_out, grad_lse = grads
    precise = accumulation_dtype(q.dtype)
    H, G = q.shape[1], k.shape[1]
    row_size, tile_size = _tile_sizes(q, k.shape[2])
    tiles = k_tokens.split(tile_size)
    # Sums over blocks of queries are kept in the accumulation dtype.
    grad_k, grad_v = torch.zeros_like(k, dtype=precise), torch.zeros_like(v, dtype=precise)
    grad_bias = None
    if needs_bias and spec.bias is not None:
        grad_bias = torch.zeros_like(spec.bias.tensor, dtype=precise)
    grad_q_blocks = []
    for rows in q_tokens.split(row_size):
        seen = _rows_of(lse, rows)
        empty = seen.isneginf()
        lse_rows = seen.masked_fill(empty, 0.0)
        # An empty row takes and gives nothing, whatever garbage its query or its gradient holds.
        q_rows = _rows_of(q, rows).to(precise).masked_fill(empty[..., None], 0.0)
        grad_rows = _rows_of(grad_out, rows).to(precise).masked_fill(empty[..., None], 0.0)
        delta = (grad_rows * _rows_of(out, rows)).masked_fill(empty[..., None], 0.0).sum(dim=-1)
        delta = delta - _rows_of(grad_lse, rows).masked_fill(empty, 0.0)
        grad_q = torch.zeros_like(q_rows)
        for tile, kind in _tiles(spec, rows, tiles):
            part = slice(tile.start, tile.start + tile.length)
            k_tile, v_tile = k[:, :, part].to(precise), v[:, :, part].to(precise)
            if kind is Visibility.SOME:
                k_tile, v_tile, _ = quarantine(k_tile, v_tile)
            scores, capped, _ = tile_scores(q_rows, k_tile, spec, rows, tile)
            # Not in place: without bias and mask the softcapped scores are these very scores.
            weights = (scores - lse_rows[..., None]).exp_().masked_fill_(empty[..., None], 0.0)
            grad_weights = unfold(fold(grad_rows, G) @ v_tile.mT, H)
            kept_weights = weights
            if spec.dropout_p:
                kept = keep_weights(spec, weights.shape, rows, tile) / (1.0 - spec.dropout_p)
                kept_weights, grad_weights = weights * kept, grad_weights * kept
            grad_v[:, :, part] += fold(kept_weights, G).mT @ fold(grad_rows, G)
            grad_scores = grad_weights.sub_(delta[..., None]).mul_(weights)
            if grad_bias is not None and spec.bias is not None:
                spec.bias.add_gradient(grad_bias, grad_scores, rows, tile)
            if capped is not None and spec.softcap is not None:
                grad_scores = grad_scores * (1.0 - (capped / spec.softcap) ** 2)
            grad_scores = fold(grad_scores.mul_(spec.scale), G)
            grad_q += unfold(grad_scores @ k_tile, H)
            grad_k[:, :, part] += grad_scores.mT @ fold(q_rows, G)
        grad_q_blocks.append(grad_q.to(q.dtype))
    total_q = torch.cat(grad_q_blocks, dim=2) if grad_q_blocks else torch.zeros_like(q)
    bias_like = None if grad_bias is None or spec.bias is None else grad_bias.to(spec.bias.tensor)
    return total_q, grad_k.to(k.dtype), grad_v.to(v.dtype), bias_like
