"""Parts of attention: norms of heads, ALiBi, temperatures of queries, positions of ragged rows.

Shape letters: B batch, H query heads, T queries, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.caches import KeyValueCache
from polyhead.config import ALiBiConfig, QKNormConfig, QueryTemperatureConfig
from polyhead.layers.norms import HeadNorm, build_norm
from polyhead.semantics import ALiBi, Bias, RoundedALiBi, alibi_slopes


def build_qk_norm(heads: int, head_dim: int, config: QKNormConfig) -> nn.Module:
    """The norm of all queries' heads, or of all keys'."""
    if config.per_head:
        return HeadNorm(heads, head_dim, config.norm)
    full = config.place == "full_width"
    return build_norm(heads * head_dim if full else head_dim, config.norm)


def alibi_of(heads: int, config: ALiBiConfig) -> Bias:
    """What ALiBi adds to the scores of so many heads."""
    slopes = alibi_slopes(heads, config.max_bias)
    if config.rounded:
        return RoundedALiBi(slopes, config.scale)
    return ALiBi(slopes * config.scale)


def tempered(q: Tensor, positions: int | Tensor, config: QueryTemperatureConfig) -> Tensor:
    """``[B, H, T, D]`` queries times the temperature of their positions."""
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, positions + q.shape[2], device=q.device)
    precise = torch.promote_types(q.dtype, torch.float32)
    periods = torch.floor((positions.to(precise) + config.offset) / config.every)
    factor = torch.log1p(periods) * config.scale + 1.0
    factor = factor[None, None, :, None] if factor.ndim == 1 else factor[:, None, :, None]
    return (q * factor).to(q.dtype)


def ragged_positions(cache: KeyValueCache, tokens: Tensor) -> Tensor | None:
    """Positions ``[B, T]`` that follow on in rows of different lengths; None where all are equal.

    Args:
        cache: Whose rows.
        tokens: ``[B, T, ...]``, the new ones.
    """
    lengths = cache.lengths
    if len(lengths) < 2 or min(lengths) == max(lengths):
        return None
    first = torch.tensor(lengths, device=tokens.device)
    return first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
