"""Which cache each layer of a configuration gets.

A layer that sees a sliding window gets a ring, a latent layer keeps latents, everything else is
dense; or all layers are paged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from polyhead.caches.sizes import Dense, Latent, Layout, Paged, Plain, Quantized, Ring, Storage
from polyhead.config import CacheShape, HeadLayout, TransformerConfig
from polyhead.errors import ConfigError

Kind = Literal["auto", "dense", "paged"]


class LayerCache(NamedTuple):
    """A cache to be made, and what it will hold; the arguments of ``cache_bytes``."""

    layout: Layout
    storage: Storage
    num_kv_heads: int
    key_dim: int
    value_dim: int


def layer_caches(
    config: TransformerConfig,
    *,
    kind: Kind = "auto",
    page_size: int = 16,
    quantized: Quantized | None = None,
    spare: int = 0,
) -> list[LayerCache]:
    """The self-attention cache of every layer.

    Args:
        config: A model's configuration.
        kind: ``"auto"``: rings for windowed layers, dense otherwise. ``"dense"`` and ``"paged"``:
            every layer keeps every token, so that any number of them can be rolled back.
        page_size: Page size of ``"paged"``.
        quantized: Quantize old tokens so; in a ring without sinks.
        spare: Tokens that a ring keeps beyond its window, to roll back that many and one.

    Raises:
        ConfigError: A page size, spare or quantization that cannot be, or a layer whose attention
            keeps no keys and values of each token.
        ValueError: An unknown kind.
    """
    if kind not in ("auto", "dense", "paged"):
        raise ValueError(f"kind must be 'auto', 'dense' or 'paged': got {kind!r}")
    # Impossible options are refused even if no layer would use them.
    Paged(page_size)
    Ring(1, spare)
    for index, layer in enumerate(config.layers):
        _check_shape(index, layer.attention)
    return [
        _layer_cache(layer.attention, kind, page_size, quantized, spare) for layer in config.layers
    ]


def _check_shape(index: int, attention: HeadLayout) -> None:
    shape = attention.cache_shape
    if type(shape) is CacheShape:  # a subclass means something else by its sizes
        sizes = shape.num_kv_heads, shape.key_dim, shape.value_dim
        if all(type(size) is int and size > 0 for size in sizes):
            return
    raise ConfigError(
        f"layer {index} keeps no keys and values of each token: cache_shape of its "
        f"{type(attention).__name__} is {shape}, and a cache needs a CacheShape of sizes above 0; "
        "make ModelCache of caches of your own, one for each layer"
    )


def _layer_cache(
    attention: HeadLayout,
    kind: Kind,
    page_size: int,
    quantized: Quantized | None,
    spare: int,
) -> LayerCache:
    layout: Layout = Paged(page_size) if kind == "paged" else Dense()
    window, shape = attention.visible_window, attention.cache_shape
    if kind == "auto" and window is not None:
        layout = Ring(window, spare)
    storage = storage_of(shape, layout, quantized)
    return LayerCache(layout, storage, shape.num_kv_heads, shape.key_dim, shape.value_dim)


def storage_of(shape: CacheShape, layout: Layout, quantized: Quantized | None) -> Storage:
    """How tokens of a shape are stored. A quantized ring keeps no exact first tokens."""
    latent = Latent(shape.value_dim, shape.key_dim - shape.value_dim) if shape.latent else None
    if quantized is None:
        return Plain() if latent is None else latent
    sink_tokens = 0 if isinstance(layout, Ring) else quantized.sink_tokens
    return replace(quantized, latent=latent, sink_tokens=sink_tokens)
