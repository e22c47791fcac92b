"""Which cache each layer of a configuration gets.

A layer that sees a sliding window gets a ring, a latent layer keeps latents, everything else is
dense; or all layers are paged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

from polyhead.caches.sizes import Dense, Latent, Layout, Paged, Plain, Quantized, Ring, Storage

Kind = Literal["auto", "dense", "paged"]


class HasAttention(Protocol):
    """A layer's configuration: a layer of attention, and one over an encoder's output or None."""

    @property
    def attention(self) -> Any: ...
    @property
    def cross_attention(self) -> Any: ...


class HasLayers(Protocol):
    """A model's configuration, such as ``TransformerConfig``."""

    @property
    def layers(self) -> Sequence[HasAttention]: ...
    def to_json(self) -> str: ...


class LayerCache(NamedTuple):
    """A cache to be made, and what it will hold; the arguments of ``cache_bytes``."""

    layout: Layout
    storage: Storage
    kv_heads: int
    key_dim: int
    value_dim: int


def layer_caches(
    config: HasLayers,
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
        page_size: Of ``"paged"``.
        quantized: Quantise old tokens so; in a ring without sinks.
        spare: Tokens that a ring keeps beyond its window, to roll back that many and one.

    Raises:
        ConfigError: A page size, spare or quantisation that cannot be.
        ValueError: An unknown kind.
    """
    if kind not in ("auto", "dense", "paged"):
        raise ValueError(f"kind must be 'auto', 'dense' or 'paged': got {kind!r}")
    # What cannot be is refused whether or not some layer would use it.
    Paged(page_size)
    Ring(1, spare)
    return [
        _layer_cache(layer.attention, kind, page_size, quantized, spare) for layer in config.layers
    ]


def _layer_cache(
    attention: Any,
    kind: Kind,
    page_size: int,
    quantized: Quantized | None,
    spare: int,
) -> LayerCache:
    layout: Layout = Paged(page_size) if kind == "paged" else Dense()
    window = getattr(attention, "window", None)
    if kind == "auto" and window is not None:
        layout = Ring(window, spare)
        quantized = None if quantized is None else replace(quantized, sinks=0)
    rank = getattr(attention, "kv_lora_rank", None)
    if rank is not None:
        latent = Latent(rank, attention.qk_rope_head_dim)
        storage = latent if quantized is None else replace(quantized, latent=latent)
        return LayerCache(layout, storage, 1, rank + attention.qk_rope_head_dim, rank)
    value_dim = attention.head_dim if attention.v_head_dim is None else attention.v_head_dim
    return LayerCache(
        layout,
        Plain() if quantized is None else quantized,
        attention.num_kv_heads,
        attention.head_dim,
        value_dim,
    )
