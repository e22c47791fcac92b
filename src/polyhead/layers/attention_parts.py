"""Parts of attention: norms of heads, ALiBi, temperatures of queries, positions of ragged rows,
and checks of arguments.

Shape letters: B batch, H query heads, T queries, D head size.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.caches import EvictingCache, KeyValueCache, LayerCache, SequenceCache
from polyhead.caches.choice import no_eviction
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    GatedAttentionConfig,
    HeadLayout,
    QKNormConfig,
    QueryTemperatureConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.norms import HeadNorm, build_norm
from polyhead.semantics import ALiBi, RoundedALiBi, alibi_slopes
from polyhead.semantics.masks.algebra import called
from polyhead.semantics.tokens import is_of


def build_qk_norm(heads: int, head_dim: int, config: QKNormConfig) -> nn.Module:
    """The norm of all queries' heads, or of all keys'."""
    if config.per_head:
        return HeadNorm(heads, head_dim, config.norm)
    full = config.place == "full_width"
    return build_norm(heads * head_dim if full else head_dim, config.norm)


def alibi_of(heads: int, config: ALiBiConfig) -> ALiBi:
    """What ALiBi adds to the scores of so many heads."""
    slopes = alibi_slopes(heads, config.max_bias)
    if config.rounded:
        return RoundedALiBi(slopes, config.scale)
    return ALiBi(slopes * config.scale)


def scale_by_temperature(
    q: Tensor, positions: int | Tensor, config: QueryTemperatureConfig
) -> Tensor:
    """``[B, H, T, D]`` queries times the temperature of their positions."""
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, positions + q.shape[2], device=q.device)
    precise = torch.promote_types(q.dtype, torch.float32)
    periods = (positions.to(precise) + config.offset) / config.every
    if config.power:
        factor = torch.exp(torch.log1p(periods) * config.scale)
    elif not config.steps:
        factor = torch.log(periods.clamp(min=1.0)) * config.scale + 1.0
    else:
        factor = _temperatures(torch.floor(periods), config)
    factor = factor[None, None, :, None] if factor.ndim == 1 else factor[:, None, :, None]
    return (q * factor).to(q.dtype)


def _temperatures(periods: Tensor, config: QueryTemperatureConfig) -> Tensor:
    return torch.log1p(periods) * config.scale + 1.0


@cache
def temperatures(config: QueryTemperatureConfig) -> Tensor:
    """``[4096]`` float32: the temperatures of the first periods of positions."""
    with torch.inference_mode(False):
        return _temperatures(torch.arange(4096, dtype=torch.float32, device="cpu"), config)


def ragged_positions(cache: SequenceCache, tokens: Tensor) -> Tensor | None:
    """Positions ``[B, T]`` that follow on in each row; None where all rows hold the same places.

    Args:
        cache: Cache whose row lengths decide.
        tokens: ``[B, T, ...]``, the new ones.
    """
    if cache.even:
        return None
    first = torch.tensor(cache.lengths, device=tokens.device)
    return first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)


def places_of(
    x: Tensor, positions: Tensor | None, cache: SequenceCache | None
) -> tuple[Tensor | None, int | Tensor]:
    """``positions`` as attention takes them, and where tokens are rotated: from where, or by these.

    Args:
        x: ``[B, T, E]``, the new tokens.
        positions: As a layer is given them; None: they follow on from the cache.
        cache: Cache whose row lengths decide; None: positions begin at 0.
    """
    if positions is None and cache is not None:
        positions = ragged_positions(cache, x)
    if positions is not None:
        return positions, positions
    return None, 0 if cache is None else cache.length


COORDINATES = frozenset((AttentionConfig, GatedAttentionConfig))
"""Layouts whose positions may have several coordinates."""


def check_coordinates(
    config: HeadLayout, positions: Tensor, batch: int, length: int, cache: object = None
) -> None:
    """Raises unless a layer can rotate so many tokens by several coordinates.

    Args:
        config: Of the layer.
        positions: ``[C, B, T]`` as the caller gave them.
        batch: B.
        length: T.
        cache: Of the layer, or None.

    Raises:
        TypeError: Not whole numbers.
        UnsupportedError: A layout, or a cache, that reads positions in another way too.
        ValueError: No rope sections, or another shape.
    """
    sections = None if config.rope is None else config.rope.sections
    said = f"positions {list(positions.shape)} have several coordinates"
    if type(config) not in COORDINATES:
        raise UnsupportedError(f"{said}: {config.layout} takes one position for each token")
    for name in ("alibi", "query_temperature"):
        if getattr(config, name) is not None:
            raise UnsupportedError(f"{said}: {name} reads one position of each token")
    if sections is None:
        raise ValueError(f"{said}: the rope of this layer has no sections; give [T] or [B, T]")
    if isinstance(cache, EvictingCache) and cache.rotates_late:
        raise UnsupportedError(f"{said}: this cache rotates tokens by their places in it")
    if positions.is_floating_point():
        raise TypeError(f"positions must be a tensor of whole numbers: got {positions.dtype}")
    if len(positions) != len(sections) or not is_of(positions[0], batch, length):
        raise ValueError(
            f"positions by coordinates must be [C, B, T] = [{len(sections)}, {batch}, {length}]: "
            f"got {list(positions.shape)}"
        )


def check_input(x: Tensor, embed_dim: int) -> None:
    """Raises ValueError unless ``x`` is ``[B, T, embed_dim]``."""
    if x.ndim != 3 or x.shape[2] != embed_dim:
        raise ValueError(f"x must be [B, T, {embed_dim}]: got {list(x.shape)}")


def check_cache(cache: object, attention: HeadLayout | None = None) -> None:
    """Raises TypeError unless ``cache`` is the cache of one layer.

    Args:
        cache: As a layer was given it.
        attention: The layer's configuration, where keys may be evicted at all.

    Raises:
        UnsupportedError: A cache that evicts keys which the layer needs.
    """
    if isinstance(cache, EvictingCache):
        why: str | None = "it keeps more of a token than keys and values of heads"
        if attention is not None:
            why = no_eviction(attention, cache.layout)
        if why is not None:
            raise UnsupportedError(f"an EvictingCache cannot serve this layer: {why}")
    if isinstance(cache, KeyValueCache):
        return
    said = "cache must be a cache of one layer, such as DenseCache(), or None"
    if isinstance(cache, type):
        raise TypeError(f"{said}: got the class {cache.__name__}; {called(cache)}")
    raise TypeError(f"{said}: got {type(cache).__name__}")


def check_layer_cache(cache: object) -> LayerCache:
    """``cache``; raises TypeError unless it is a ``LayerCache``."""
    if isinstance(cache, LayerCache):
        return cache
    raise TypeError(
        "cache must be a LayerCache of this layout's memories, as new_cache makes it: got "
        f"{type(cache).__name__}"
    )


def default_head_dim(embed_dim: int, num_heads: int) -> int:
    """embed_dim / num_heads; raises ConfigError where that is not whole."""
    check_sizes(embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        near = range(max(1, num_heads - 1000), min(embed_dim, num_heads + 1000) + 1)
        divisors = [heads for heads in near if embed_dim % heads == 0] or [1]
        nearest = min(divisors, key=lambda heads: (abs(heads - num_heads), -heads))
        raise ConfigError(
            f"num_heads must divide embed_dim: got embed_dim={embed_dim}, num_heads={num_heads}; "
            f"use {nearest} or pass head_dim"
        )
    return embed_dim // num_heads


def check_sizes(**sizes: int | None) -> None:
    """Raises ConfigError unless all that are given are whole numbers of at least 1."""
    for name, value in sizes.items():
        if value is not None:
            check_int(name, value, least=1, error=ConfigError)
