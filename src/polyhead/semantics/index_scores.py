"""The scores by which queries choose keys: the lightning indexer.

    I[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])

DeepSeek-V3.2 (2025), arXiv 2512.02556, eq. 1. All heads share one key per token.

Shape letters: B batch, H heads of the indexer, T queries, S keys, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """``[B, T, S]`` in float32, or float64 for such queries; differentiable.

    Args:
        q: ``[B, H, T, D]``.
        weights: ``[B, H, T]``, of heads, scaled.
        k: ``[B, S, D]``.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    B, H, T, D = q.shape
    rows = q.to(precise).transpose(1, 2).reshape(B, T * H, D)
    products = (rows @ k.to(precise).mT).relu().view(B, T, H, k.shape[1])
    return (weights.to(precise).mT[:, :, None] @ products)[:, :, 0]
