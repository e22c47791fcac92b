"""Which cache each layer of a configuration gets.

A layer that sees a sliding window gets a ring, a latent layer keeps latents, everything else is
dense; or all layers are paged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from polyhead.caches.eviction import Evicting
from polyhead.caches.sizes import Dense, Latent, Layout, Paged, Plain, Quantized, Ring, Storage
from polyhead.config import AttentionConfig, HeadLayout, Memory, PerToken, TransformerConfig
from polyhead.errors import ConfigError

Kind = Literal["auto", "dense", "paged"]
_BY_POSITION = "its bias needs positions of keys, which would differ from head to head"


class LayerChoice(NamedTuple):
    """A cache to be made, and what it will hold.

    Attributes:
        layout: Where keys and values of tokens lie, and so on: the arguments of ``cache_bytes``.
            Sizes of 0: the layer keeps none.
        memories: All that the layer keeps.
    """

    layout: Layout
    storage: Storage
    num_kv_heads: int
    key_dim: int
    value_dim: int
    memories: tuple[Memory, ...]

    @property
    def plain(self) -> bool:
        """Whether keys and values of each token, of one kind, are all that the layer keeps."""
        return is_plain(self.memories)


def layer_caches(
    config: TransformerConfig,
    *,
    kind: Kind = "auto",
    page_size: int = 16,
    quantized: Quantized | None = None,
    spare: int = 0,
    evicting: Evicting | None = None,
) -> list[LayerChoice]:
    """The self-attention cache of every layer.

    Args:
        config: A model's configuration.
        kind: ``"auto"``: rings for windowed layers, dense otherwise. ``"dense"`` and ``"paged"``:
            every layer keeps every token, so that any number of them can be rolled back.
        page_size: Page size of ``"paged"``.
        quantized: Quantize old tokens so; in a ring without sinks.
        spare: Tokens that a ring keeps beyond its window, to roll back that many and one.
        evicting: Evict keys so in layers without a window; with ``"auto"``, and not quantized.

    Raises:
        ConfigError: A page size, spare or quantization that cannot be, memories of a layer that no
            cache can hold, or a layer whose keys cannot be evicted.
        ValueError: An unknown kind.
    """
    if kind not in ("auto", "dense", "paged"):
        raise ValueError(f"kind must be 'auto', 'dense' or 'paged': got {kind!r}")
    # Impossible options are refused even if no layer would use them.
    Paged(page_size)
    Ring(1, spare)
    if evicting is not None:
        check_evicting(config, evicting, kind=kind, quantized=quantized)
    kept = [
        (*layer.attention.memories, *layer.out_memories(config.embed_dim))
        for layer in config.layers
    ]
    for index, (layer, memories) in enumerate(zip(config.layers, kept, strict=True)):
        _check_memories(index, layer.attention, memories)
    return [
        _layer_cache(layer.attention, memories, kind, page_size, quantized, spare, evicting)
        for layer, memories in zip(config.layers, kept, strict=True)
    ]


def check_evicting(
    config: TransformerConfig,
    evicting: Evicting,
    *,
    kind: Kind = "auto",
    quantized: Quantized | None = None,
) -> None:
    """Raises ConfigError unless each layer has a window or keys that can be evicted.

    Args:
        config: A model's configuration.
        evicting: The layout.
        kind: As in ``layer_caches``.
        quantized: As in ``layer_caches``.
    """
    if not isinstance(evicting, Evicting):
        raise ConfigError(
            "evicting must be H2O(budget), SnapKV(budget) or StreamingLLM(budget): got "
            f"{evicting!r}"
        )
    if kind != "auto" or quantized is not None:
        raise ConfigError(
            f"evicting={evicting} goes with kind='auto' and quantized=None, since evicted keys are "
            f"lost: got kind={kind!r}, quantized={quantized}"
        )
    for index, layer in enumerate(config.layers):
        if layer.attention.visible_window is not None:
            continue  # a ring, of what it sees
        why = no_eviction(layer.attention, evicting)
        if evicting.by_weight and config.relative_bias is not None:
            why = _BY_POSITION
        if not evicting.by_weight and config.embedding.positions is not None:
            why = f"{config.embedding.positions} positions of tokens cannot be places in the cache"
        if layer.out_memories(config.embed_dim):
            why = "it remembers more than keys and values"
        if why is not None:
            raise ConfigError(f"layer {index}, {layer.attention.layout}, cannot evict keys: {why}")


def no_eviction(attention: HeadLayout, evicting: Evicting) -> str | None:
    """Why the keys of a layer cannot be evicted as a layout does; None: they can."""
    if not isinstance(attention, AttentionConfig) or attention.no_eviction is not None:
        return attention.no_eviction
    if evicting.by_weight and attention.alibi is not None:
        return _BY_POSITION
    norm = attention.qk_norm
    if not evicting.by_weight and norm is not None and norm.place == "after_rope":
        return f"{evicting} rotates keys when they are read, and they are normalized after that"
    return None


def is_plain(memories: tuple[Memory, ...]) -> bool:
    """Whether memories are keys and values of each token, of one kind."""
    return len(memories) == 1 and memories[0].keys_and_values is not None


def check_memories(memories: tuple[Memory, ...]) -> None:
    """Raises ConfigError unless a cache can hold the memories of a layer."""
    names = [memory.name for memory in memories]
    if memories and len({*names}) == len(names) and all(memory.valid for memory in memories):
        return
    raise ConfigError(
        "a cache needs memories of sizes above 0 and of different names: got "
        f"{', '.join(map(str, memories)) or 'none'}"
    )


def _check_memories(index: int, attention: HeadLayout, memories: tuple[Memory, ...]) -> None:
    try:
        check_memories(memories)
    except ConfigError as error:
        raise ConfigError(f"layer {index}, {type(attention).__name__}: {error}") from error


def _layer_cache(
    attention: HeadLayout,
    memories: tuple[Memory, ...],
    kind: Kind,
    page_size: int,
    quantized: Quantized | None,
    spare: int,
    evicting: Evicting | None,
) -> LayerChoice:
    layout: Layout = Paged(page_size) if kind == "paged" else evicting or Dense()
    window = attention.visible_window
    if kind == "auto" and window is not None:
        layout = Ring(window, spare)
    shape = first_tokens(memories)
    if shape is None:
        return LayerChoice(layout, Plain(), 0, 0, 0, memories)
    storage = storage_of(shape, layout, quantized)
    return LayerChoice(
        layout, storage, shape.num_kv_heads, shape.key_dim, shape.value_dim, memories
    )


def first_tokens(memories: tuple[Memory, ...]) -> PerToken | None:
    """The first keys and values of each token among memories, or None."""
    found = (memory.keys_and_values for memory in memories)
    return next((memory for memory in found if memory is not None), None)


def layout_of(memory: Memory, layout: Layout, spare: int = 0) -> Layout:
    """Where the tokens of one of a layer's memories lie: a ring for the last ones alone.

    Args:
        memory: Keys and values of tokens.
        layout: That of the layer's keys and values.
        spare: Tokens kept beyond the last ones.
    """
    most = memory.most_tokens
    return layout if most is None else Ring(most, spare)


def storage_of(shape: PerToken, layout: Layout, quantized: Quantized | None) -> Storage:
    """How tokens of a shape are stored. A quantized ring keeps no exact first tokens."""
    latent = Latent(shape.value_dim, shape.key_dim - shape.value_dim) if shape.latent else None
    if quantized is None:
        return Plain() if latent is None else latent
    sink_tokens = 0 if isinstance(layout, Ring) else quantized.sink_tokens
    return replace(quantized, latent=latent, sink_tokens=sink_tokens)
