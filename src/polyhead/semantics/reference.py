"""The reference: the meaning of attention, written to be read beside the formula.

    Attention(Q, K, V) = softmax(mask(softcap(Q Kᵀ · scale) + bias)) V        scale = 1/√d_k

Vaswani et al. 2017, eq. 1; softcap: Gemma 2 (2024); grouped heads: Ainslie et al. 2023. It holds
the whole [B, H, T, S] matrix, works in float64 for float64 and in float32 for everything else, and
rounds once, at the end. Every other kernel is judged against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.semantics.call import Call
from polyhead.semantics.normalizer import normalized
from polyhead.semantics.scores import (
    accumulation_dtype,
    fold,
    keep_weights,
    sees_nonfinite,
    tile_scores,
    unfold,
    zero_nonfinite,
)
from polyhead.semantics.state import State


def attend(call: Call) -> State:
    """Computes ``out [B, H, T, V]`` in q's dtype and ``lse [B, H, T]``; differentiable.

    A normalizer takes the softmax's place; then lse is None.
    """
    q, spec = call.q, call.spec
    k, v = call.source.gather()
    precise = accumulation_dtype(q.dtype)
    k, v = k.to(precise), v.to(precise)
    q_scaled, bad = q.to(precise) * spec.scale, None
    if spec.mask is not None:
        k, v, bad = zero_nonfinite(k, v)
        # A query that sees nothing is not read either: its NaN would reach the gradient of the
        # keys.
        seen = spec.mask.visible(call.q_tokens, call.source.tokens, q.device)
        q_scaled = q_scaled.where(seen.any(dim=-1, keepdim=True), 0.0)

    scores, _, visible = tile_scores(q_scaled, k, spec, call.q_tokens, call.source.tokens)
    lse: Tensor | None
    if spec.normalizer is None:
        weights, lse = softmax(scores)
    else:
        weights, lse = normalized(spec.normalizer, scores, call.q_tokens, call.source.tokens), None
    if spec.dropout_p:
        kept = keep_weights(spec, weights.shape, call.q_tokens, call.source.tokens)
        weights = (weights / (1.0 - spec.dropout_p)).masked_fill(~kept, 0.0)
    out = unfold(fold(weights, k.shape[1]) @ v, q.shape[1])

    if bad is not None:
        spoilt = sees_nonfinite(visible, bad, q.shape[1])
        if spec.normalizer is not None and spec.normalizer.mixes_heads:
            spoilt = spoilt.any(dim=1, keepdim=True)
        out = out.masked_fill(spoilt[..., None], torch.nan)
    return State(out.to(q.dtype), lse)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and its log-sum-exp; a row of −∞ gives 0 and lse −∞."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    empty = scores.isneginf().all(dim=-1, keepdim=True)
    # An empty row uses the softmax of zeros, so that its gradient is 0 and not NaN.
    scores = scores.masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - lse).masked_fill(empty, 0.0)
    return weights, lse.masked_fill(empty, -torch.inf).squeeze(-1)
