"""Exact attention weights of chosen rows, recomputed from q, k and the saved lse.

    p_ij = exp(score_ij − lse_i)

Any row of the T×S matrix costs one row of scores; the matrix itself is never needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.semantics.call import Specification
from polyhead.semantics.scores import (
    accumulation_dtype,
    full_precision,
    sees_nonfinite,
    tile_scores,
    zero_nonfinite,
)
from polyhead.semantics.tokens import Tokens


def log_weight_rows(
    q: Tensor, k: Tensor, lse: Tensor, spec: Specification, q_tokens: Tokens, k_tokens: Tokens
) -> Tensor:
    """The natural logarithms of the weights of a run of queries on a run of keys.

    Args:
        q: ``[B, H, T, D]`` queries of the run ``q_tokens``.
        k: ``[B, G, S, D]`` keys of the run ``k_tokens``.
        lse: ``[B, H, T]`` natural-log log-sum-exp of each query row over all of its keys.
        spec: The specification that the attention was computed with.
        q_tokens: Positions and places of the queries.
        k_tokens: Positions and places of the keys.

    Returns:
        ``[B, H, T, S]`` in float32 (float64 for float64), whatever autocast says; before dropout.
        −∞ for a key that is not seen. Keys that are masked are not read: one with NaN or Inf in it
        makes the rows NaN that may see it, and no other.
    """
    precise = accumulation_dtype(q.dtype)
    empty = lse.isneginf()
    q_scaled = q.to(precise).masked_fill(empty[..., None], 0.0) * spec.scale
    k, bad = k.to(precise), None
    if spec.mask is not None:
        k, _, bad = zero_nonfinite(k, k[..., :0])  # weights do not depend on values
    with full_precision(q):
        scores, _, visible = tile_scores(q_scaled, k, spec, q_tokens, k_tokens)
    # A row that saw nothing has scores and lse of −∞, whose difference would be NaN.
    logs = scores.sub_(lse.to(precise).masked_fill(empty, torch.inf)[..., None])
    if bad is not None:
        logs = logs.masked_fill(sees_nonfinite(visible, bad, q.shape[1])[..., None], torch.nan)
    return logs


def weight_rows(
    q: Tensor, k: Tensor, lse: Tensor, spec: Specification, q_tokens: Tokens, k_tokens: Tokens
) -> Tensor:
    """The weights of a run of queries on a run of keys; takes what ``log_weight_rows`` takes.

    Returns:
        ``[B, H, T, S]`` as there; a query that saw nothing has weights 0.
    """
    return log_weight_rows(q, k, lse, spec, q_tokens, k_tokens).exp_()
