"""Attention in tiles with an online softmax: every feature, O(T) memory, any device, pure PyTorch.

FlashAttention's recurrence (Dao et al. 2022; Milakov & Gimelshein 2018). A block of queries goes
over the keys a tile at a time and keeps, per row, the running maximum m, the sum l of
exp(score − m) and the weighted values acc:

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.base import Kernel, Refusal
from polyhead.kernels.whole_rows import attend_by_rows
from polyhead.semantics import Call, DenseSource, KeyValueSource, State, Tokens, Visibility
from polyhead.semantics.call import Specification
from polyhead.semantics.scores import (
    accumulation_dtype,
    fold,
    full_precision,
    implicit_replication,
    keep_weights,
    reproducibly,
    sees_nonfinite,
    tile_scores,
    unfold,
    zero_nonfinite,
)
from polyhead.semantics.tokens import is_traced, is_transformed

SCORES_PER_TILE = 1 << 19
"""Scores held at a time on a CPU (2 MiB in float32): large enough for matrix products to run at
their rate, small enough to stay in its cache. Elsewhere 16 times as many."""

TILE_SIDE = 256
"""Most queries of a tile on a CPU, and most keys beside so many: what a window's edges cut off a
tile is computed for nothing. Elsewhere 4 times as many."""

KEYS_PER_TILE = 2048
"""Most keys of a tile, so that a single query with a window skips what lies outside."""

WIDENED_PER_TILE = 3 << 16
"""Most elements of half-precision keys, or values, that are float32 at a time (768 KiB) beside few
queries: decoding allocates less than 1 MiB besides its output."""


class TiledKernel(Kernel[None]):
    name = "tiled"
    summary = "online softmax over tiles in pure PyTorch; every feature, O(T) memory, any device"
    takes_normalizers = True

    def plan(self, call: Call) -> Refusal | None:
        spec = call.spec
        if spec.normalizer is not None and spec.deterministic and call.requires_grad:
            return Refusal(
                f"deterministic gradients with normalizer={spec.normalizer!r} (torch computes them "
                "on all threads)"
            )
        return None

    def run(self, call: Call, plan: None) -> State:
        with implicit_replication(*call.tensors().values()):
            return self._run(call)

    def _run(self, call: Call) -> State:
        if call.spec.normalizer is not None:
            return State(attend_by_rows(call, SCORES_PER_TILE), None)
        traced = not torch.compiler.is_compiling() and torch._C._is_tracing()
        if not call.requires_grad or is_transformed() or traced:
            # Under vmap, nested derivatives and torch.jit.trace torch differentiates the tiles
            # themselves.
            return State(*_forward(call.q, call.source, call.spec, call.q_tokens))
        k, v = call.source.gather()
        learned = () if call.spec.bias is None else call.spec.bias.tensors
        out, lse = _Tiled.apply(  # type: ignore[no-untyped-call]
            call.q, k, v, call.spec, call.q_tokens, call.source.tokens, *learned
        )
        return State(out, lse)

    def gradients(
        self, call: Call, plan: None, result: State, grads: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        k, v = call.source.gather()
        bias, lse = call.spec.bias, result.lse
        learned = bias is not None and any(x.requires_grad for x in bias.tensors)
        assert lse is not None
        saved, where = (call.q, k, v, result.out, lse), (call.q_tokens, call.source.tokens)
        with implicit_replication(*call.tensors().values()):
            of_inputs, of_bias = _backward(saved, grads, call.spec, *where, needs_bias=learned)
        return [*of_inputs, *of_bias]


def _tile_sizes(q: Tensor, keys: int) -> tuple[int, int]:
    """Queries and keys per tile."""
    heads = q.shape[0] * q.shape[1]
    on_cpu = q.device.type == "cpu"
    most, side = (SCORES_PER_TILE, TILE_SIDE) if on_cpu else (16 * SCORES_PER_TILE, 4 * TILE_SIDE)
    area = max(1, most // max(1, heads))
    rows = max(1, min(q.shape[2], side, max(16, 1 << int(math.log2(area) / 2))))
    return rows, max(64, min(keys, area // rows, KEYS_PER_TILE if rows < side else side))


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
    """``out [B, H, T, V]`` in q's dtype and ``lse [B, H, T]``, a block of queries at a time."""
    row_size, tile_size = _tile_sizes(q, source.tokens.length)
    if row_size < 16 and source.dtype != accumulation_dtype(q.dtype):
        per_key = source.batch * source.num_kv_heads * max(source.key_dim, source.value_dim)
        tile_size = min(tile_size, max(64, WIDENED_PER_TILE // max(1, per_key)))
    tiles = source.tiles(tile_size)
    blocks = q_tokens.split(row_size)
    if len(blocks) == 1:
        return _forward_block(q, source, spec, blocks[0], tiles)
    out = q.new_empty(*q.shape[:3], source.value_dim)
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    if is_traced(q) or not blocks:
        states = [_forward_block(q, source, spec, rows, tiles) for rows in blocks]
        outs, lses = [out[:, :, :0]], [lse[:, :, :0]]
        outs.extend(state[0] for state in states)
        lses.extend(state[1] for state in states)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
    for rows in blocks:
        part = slice(rows.start, rows.start + rows.length)
        out[:, :, part], lse[:, :, part] = _forward_block(q, source, spec, rows, tiles)
    return out, lse


def _forward_block(
    q: Tensor, source: KeyValueSource, spec: Specification, rows: Tokens, tiles: list[Tokens]
) -> tuple[Tensor, Tensor]:
    """``out [B, H, rows, V]`` and ``lse [B, H, rows]`` of one block of queries."""
    H, G = q.shape[1], source.num_kv_heads
    precise = accumulation_dtype(q.dtype)
    q_BHTD = (_rows_of(q, rows).to(precise) * spec.scale).contiguous()
    peak = total = acc = nonfinite = None
    for tile, _ in _tiles(spec, rows, tiles):
        k, v = source.read(tile)
        bad = None
        if spec.mask is not None:
            k, v, bad = zero_nonfinite(k, v)
        scores, _, visible = tile_scores(q_BHTD, k.to(precise), spec, rows, tile)
        if bad is not None:
            now_nonfinite = sees_nonfinite(visible, bad, H)
            nonfinite = now_nonfinite if nonfinite is None else nonfinite | now_nonfinite
        # The result does not depend on the peak, so neither does its gradient.
        tile_peak = scores.detach().amax(dim=-1)
        new_peak = tile_peak if peak is None else torch.maximum(peak, tile_peak)
        # Before a row has seen any key its peak is −∞; subtract 0 instead to avoid NaN.
        safe_peak = new_peak.masked_fill(new_peak.isneginf(), 0.0)
        weights = _exp_difference(scores, safe_peak)
        tile_total = weights.sum(dim=-1)
        if spec.dropout_p:
            weights = weights * keep_weights(spec, weights.shape, rows, tile)
        tile_acc = unfold(fold(weights, G) @ v.to(precise), H)
        if peak is None or total is None or acc is None:
            total, acc = tile_total, tile_acc
        else:
            rescale = torch.exp(peak - safe_peak)
            total = total * rescale + tile_total
            acc = acc * rescale[..., None] + tile_acc
        peak = new_peak
    if peak is None or total is None or acc is None:
        out = q.new_zeros(*q_BHTD.shape[:3], source.value_dim)
        return out, q_BHTD.new_full(q_BHTD.shape[:3], -torch.inf)
    some = total.masked_fill(total == 0, 1.0)
    out = acc / (some * (1.0 - spec.dropout_p))[..., None]
    if nonfinite is not None:
        out = out.masked_fill(nonfinite[..., None], torch.nan)
    return out.to(q.dtype), peak + torch.log(some)


def _exp_difference(scores: Tensor, rows: Tensor) -> Tensor:
    """exp(score − row), in place unless traced."""
    if is_traced(scores) or is_traced(rows):
        return torch.exp(scores - rows[..., None])
    return scores.sub_(rows[..., None]).exp_()


def _rows_of(x: Tensor, rows: Tokens) -> Tensor:
    """The rows of a block, ``[B, H, rows, …]``."""
    return x[:, :, rows.start : rows.start + rows.length]


def _first_derivatives_only(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """For a backward pass that cannot be differentiated: a second derivative is an error.

    Unlike torch's ``once_differentiable``, it also raises if the incoming gradient is constant,
    such as that of a sum.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        fail = torch._C._functions.DelayedError(
            b"the tiled kernel cannot differentiate twice; kernel='reference' can", len(found)
        )
        leaves = [None if x is None else x.detach().requires_grad_() for x in found]
        return fail(*leaves)  # type: ignore[arg-type]  # torch's stub knows no None among them

    return once


class _Tiled(torch.autograd.Function):
    """The tiled forward pass with its own backward pass, which stores q, k, v, out and lse only."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: Specification,
        q_tokens: Tokens,
        k_tokens: Tokens,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return _forward(q, DenseSource.over(k, v, k_tokens), _learned(spec, learned), q_tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.spec, ctx.q_tokens, ctx.k_tokens, *learned = inputs
        out, lse = output
        ctx.save_for_backward(q, k, v, out, lse, *learned)

    @staticmethod
    @_first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *learned = ctx.saved_tensors
        spec = _learned(ctx.spec, learned)
        needs_bias = any(ctx.needs_input_grad[6:])
        with full_precision(q), reproducibly(spec, q), implicit_replication(q, k, v, *learned):
            of_inputs, of_bias = _backward(
                (q, k, v, out, lse), grads, spec, ctx.q_tokens, ctx.k_tokens, needs_bias=needs_bias
            )
        return (*of_inputs, None, None, None, *(of_bias if needs_bias else [None] * len(learned)))


def _learned(spec: Specification, tensors: Sequence[Tensor]) -> Specification:
    """The specification whose bias is computed from the tensors that autograd handed over."""
    return spec if spec.bias is None else replace(spec, bias=spec.bias.with_tensors(tensors))


def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, ...],
    spec: Specification,
    q_tokens: Tokens,
    k_tokens: Tokens,
    *,
    needs_bias: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
    """Gradients of q, k, v, and of the bias's tensors if they are needed."""
    q, k, v, out, lse = saved
    grad_out, grad_lse = grads
    precise = accumulation_dtype(q.dtype)
    H, G = q.shape[1], k.shape[1]
    row_size, tile_size = _tile_sizes(q, k.shape[2])
    tiles = k_tokens.split(tile_size)
    # Sums over blocks of queries are kept in the accumulation dtype.
    grad_q = torch.zeros_like(q)
    grad_k = torch.zeros_like(k, dtype=precise)
    grad_v = torch.zeros_like(v, dtype=precise)
    learned = spec.bias.tensors if needs_bias and spec.bias is not None else ()
    grad_bias = [torch.zeros_like(x, dtype=precise) for x in learned]
    for rows in q_tokens.split(row_size):
        lse_rows, out_rows = _rows_of(lse, rows), _rows_of(out, rows)
        # A row has no gradients if it saw nothing, or saw content that is not finite (then out is
        # NaN but lse, of keys set to 0, is not), whatever its query and gradient hold.
        no_grad_rows = lse_rows.isneginf() | (out_rows.isnan().any(dim=-1) & lse_rows.isfinite())
        lse_rows = lse_rows.masked_fill(no_grad_rows, torch.inf)
        out_rows = out_rows.masked_fill(no_grad_rows[..., None], 0.0)
        q_rows = (
            _rows_of(q, rows).to(precise).masked_fill(no_grad_rows[..., None], 0.0) * spec.scale
        )
        grad_rows = _rows_of(grad_out, rows).to(precise).masked_fill(no_grad_rows[..., None], 0.0)
        delta = (grad_rows * out_rows).sum(dim=-1)
        delta = delta - _rows_of(grad_lse, rows).masked_fill(no_grad_rows, 0.0)
        q_rows, grad_rows = q_rows.contiguous(), grad_rows.contiguous()
        grad_q_rows = torch.zeros_like(q_rows)
        for tile, _ in _tiles(spec, rows, tiles):
            part = slice(tile.start, tile.start + tile.length)
            k_tile, v_tile = k[:, :, part].to(precise), v[:, :, part].to(precise)
            if spec.mask is not None:
                k_tile, v_tile, _ = zero_nonfinite(k_tile, v_tile)
            scores, capped, _ = tile_scores(q_rows, k_tile, spec, rows, tile)
            # Without bias and mask the softcapped scores are these very scores: keep them.
            if scores is capped:
                scores = scores.clone()
            weights = _exp_difference(scores, lse_rows)
            grad_weights = unfold(fold(grad_rows, G) @ v_tile.mT, H)
            kept_weights = weights
            if spec.dropout_p:
                kept = keep_weights(spec, weights.shape, rows, tile).to(precise)
                kept = kept / (1.0 - spec.dropout_p)
                kept_weights, grad_weights = weights * kept, grad_weights * kept
            grad_v[:, :, part] += fold(kept_weights, G).mT @ fold(grad_rows, G)
            grad_scores = (grad_weights - delta[..., None]) * weights
            if learned and spec.bias is not None:
                spec.bias.add_gradients(grad_bias, grad_scores, rows, tile)
            if capped is not None and spec.softcap is not None:
                grad_scores = grad_scores * (1.0 - (capped / spec.softcap) ** 2)
            grad_scores = fold(grad_scores, G)
            grad_q_rows = grad_q_rows + unfold(grad_scores @ k_tile, H)
            grad_k[:, :, part] += grad_scores.mT @ fold(q_rows, G)
        grad_q[:, :, rows.start : rows.start + rows.length] = grad_q_rows * spec.scale
    of_bias = [grad.to(x) for grad, x in zip(grad_bias, learned, strict=True)]
    return (grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)), of_bias
