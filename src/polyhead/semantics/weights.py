"""Exact attention weights of chosen rows, recomputed from q, k and the saved lse.

    p_ij = exp(score_ij − lse_i)

Any row of the T×S matrix costs one row of scores; the matrix itself is never needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.semantics.call import Specification
from polyhead.semantics.scores import accumulation_dtype, tile_scores
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
        ``[B, H, T, S]`` in float32 (float64 for float64): −∞ for a key that is not seen.
    """
    precise = accumulation_dtype(q.dtype)
    scores, _, _ = tile_scores(q.to(precise) * spec.scale, k.to(precise), spec, q_tokens, k_tokens)
    # A row that saw nothing has scores and lse of −∞, whose difference would be NaN.
    return scores.sub_(lse.to(precise).masked_fill(lse.isneginf(), torch.inf)[..., None])


def weight_rows(
    q: Tensor, k: Tensor, lse: Tensor, spec: Specification, q_tokens: Tokens, k_tokens: Tokens
) -> Tensor:
    """The weights of a run of queries on a run of keys; takes what ``log_weight_rows`` takes.

    Returns:
        ``[B, H, T, S]`` in float32 (float64 for float64); a query that saw nothing has weights 0.
    """
    return log_weight_rows(q, k, lse, spec, q_tokens, k_tokens).exp_()
