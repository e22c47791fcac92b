"""Cache bytes per layer, token and rank, and what fits in a memory.

The bytes are those of ``polyhead.caches.sizes``, which the caches themselves allocate by: a plan is
not an estimate of the allocator, it is the allocator's own description.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from polyhead._utils.system_memory import system_memory
from polyhead.caches.choice import check_memories, layout_of, storage_of
from polyhead.caches.eviction import Evicting
from polyhead.caches.parts import dtype_of, memory_bytes, read_bytes
from polyhead.caches.sizes import (
    Dense,
    Layout,
    Paged,
    Plain,
    Quantized,
    Ring,
    Storage,
    Store,
    cache_bytes,
    held_tokens,
    stores,
    units,
)
from polyhead.config import HeadLayout, Memory, TransformerConfig
from polyhead.errors import ConfigError

CACHE_TYPES: dict[str, torch.dtype | int] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": 8,
    "int4": 4,
}
"""A dtype of keys and values, or the bits of a quantized cache around exact bfloat16 tokens."""

_MOST = 1 << 40


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache on one rank, as the allocator describes it."""

    layout: Layout
    storage: Storage
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    others: tuple[Memory, ...] = ()
    """What it keeps beside the keys and values, whose sizes are 0 where there are none."""
    more: tuple[LayerCache, ...] = ()
    """Further keys and values of each token, of other kinds."""
    chosen: int | None = None
    """Keys that a query reads at most, where it chooses or sees a window of pages; None: all."""
    borrowed: bool = False
    """Whether another layer keeps its keys and values, which it only reads."""

    def bytes(self, tokens: int, batch_size: int) -> int:
        """Bytes allocated for ``tokens`` tokens in each of ``batch_size`` rows."""
        others = sum(
            memory_bytes(memory, tokens=tokens, batch_size=batch_size, dtype=self.dtype)
            for memory in self.others
        )
        others += sum(each.bytes(tokens, batch_size) for each in self.more)
        if not self.num_kv_heads or self.borrowed:
            return others
        return others + cache_bytes(
            self.layout,
            self.storage,
            tokens=tokens,
            batch_size=batch_size,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
        )

    def read_bytes(self, tokens: int, batch_size: int) -> int:
        """Bytes that a decode step at ``tokens`` tokens reads."""
        read = self.read_units(tokens)
        held = sum(read[store.name] * store.unit_bytes for store in self._stores())
        more = sum(each.read_bytes(tokens, batch_size) for each in self.more)
        return more + batch_size * (
            held + sum(read_bytes(memory, tokens, self.dtype) for memory in self.others)
        )

    def read_units(self, tokens: int) -> dict[str, int]:
        """Units of each store that hold a row's ``tokens`` tokens, each token once.

        The tail of a quantized cache has room for tokens that are in codes already.
        """
        if self.chosen is not None:
            tokens = min(tokens, self.chosen)
        tokens = held_tokens(self.layout, tokens)
        held = units(self.storage, tokens)
        if isinstance(self.storage, Quantized):
            held["tail"] = tokens - held["sinks"] - held["codes"] * self.storage.group
        return {
            store.name: held[store.name]
            if store.limit is None
            else min(held[store.name], store.limit)
            for store in self._stores()
        }

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token, while no window is full."""
        others = sum(m.token_elements * dtype_of(m, self.dtype).itemsize for m in self.others)
        others += sum(each.token_bytes for each in self.more)
        if self.borrowed:
            return others
        return others + sum(
            store.unit_bytes / store.tokens
            for store in self._stores()
            if store.name in ("tokens", "codes")
        )

    def _stores(self) -> tuple[Store, ...]:
        if not self.num_kv_heads:
            return ()
        return stores(
            self.layout,
            self.storage,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
        )


def layer_cache(
    shape: HeadLayout,
    kv_dtype: str,
    page_size: int | None = None,
    ranks: int = 1,
    beside: tuple[Memory, ...] = (),
    evicting: Evicting | None = None,
) -> LayerCache:
    """The cache that one attention, and ``beside`` its layer, needs on each rank.

    As ``polyhead.caches.choice.layer_caches`` chooses: a window is a ring of that many tokens,
    except in pages, which keep every token, and keys are evicted where there is no window.

    Raises:
        ConfigError: An unknown ``kv_dtype`` or a page that does not go with it.
    """
    if kv_dtype not in CACHE_TYPES:
        raise ConfigError(f"kv_dtype must be one of {', '.join(CACHE_TYPES)}: got {kv_dtype!r}")
    kind = CACHE_TYPES[kv_dtype]
    dtype = kind if isinstance(kind, torch.dtype) else torch.bfloat16
    bits = kind if isinstance(kind, int) else None
    if shape.one_pass is not None:
        raise ConfigError(f"{type(shape).__name__} has no cache to plan: {shape.one_pass}")
    memories = (*shape.memories, *beside)
    check_memories(memories)
    kept = tuple(m for memory in memories if (m := memory.keys_and_values or memory.borrowed))
    others = tuple(memory for memory in memories if not (memory.keys_and_values or memory.borrowed))
    if others and ranks > 1:
        raise ConfigError(
            f"{type(shape).__name__} keeps {', '.join(map(str, others))}, which ranks cannot "
            f"share: ranks must be 1: got {ranks}"
        )
    layout: Layout = evicting or Dense() if page_size is None else Paged(page_size)
    window, chosen = shape.visible_window, shape.attention_span.chosen
    if window is not None and page_size is None:
        layout = Ring(window)
    elif window is not None:
        chosen = window if chosen is None else min(window, chosen)
    made = [
        LayerCache(
            (where := layout_of(held, layout)),
            storage_of(held, where, None if bits is None else Quantized(bits, bits)),
            -(-held.num_kv_heads // ranks),
            held.key_dim,
            held.value_dim,
            dtype,
        )
        for held in kept
    ]
    for each in made:
        each._stores()  # refuses options that contradict each other
    first = made[0] if made else LayerCache(layout, Plain(), 0, 0, 0, dtype)
    borrowed = any(memory.borrowed for memory in memories)
    return replace(first, others=others, more=tuple(made[1:]), chosen=chosen, borrowed=borrowed)


def caches(
    model: TransformerConfig,
    kv_dtype: str,
    page_size: int | None = None,
    ranks: int = 1,
    evicting: Evicting | None = None,
) -> tuple[LayerCache, ...]:
    """One cache per decoder layer, then one per cross-attention; an encoder has none."""
    if model.kind == "encoder":
        return ()
    crossed = [layer.crossing for layer in model.layers if layer.crossing]
    return (
        *(
            layer_cache(
                layer.attention,
                kv_dtype,
                page_size,
                ranks,
                layer.out_memories(model.embed_dim),
                evicting,
            )
            for layer in model.layers
        ),
        # A context comes at once and stays, so it needs no pages.
        *(layer_cache(shape, kv_dtype, None, ranks) for shape in crossed),
    )


def token_bytes(model: TransformerConfig, kv_dtype: str, ranks: int = 1) -> int:
    """Bytes of one more token in the caches of all layers, while no window is full.

    Args:
        model: Whose layers they are.
        kv_dtype: Of keys and values.
        ranks: Processes that share the heads; the bytes are those of one of them.
    """
    return math.ceil(sum(layer.token_bytes for layer in caches(model, kv_dtype, ranks=ranks)))


def free_memory() -> int:
    """Bytes of memory that are free, as the system says; 4 GiB where it does not (macOS)."""
    free = system_memory().free
    return 4 << 30 if free is None else free


def total_bytes(layers: Counter[LayerCache], tokens: int, batch_size: int) -> int:
    """Cache bytes of all layers on one rank."""
    return sum(times * layer.bytes(tokens, batch_size) for layer, times in layers.items())


@dataclass(frozen=True)
class Fit:
    """What fits in the memory of one rank beside the weights; activations are not counted.

    Attributes:
        memory: Bytes of one rank.
        free: Bytes that the weights leave.
        fits: Whether the tokens and batch of the plan do.
        longest_context: Most tokens per sequence at the plan's batch; None: the cache stops
            growing, or there is none.
        largest_batch: Most sequences of the plan's tokens; None: there is no cache.
    """

    memory: int
    free: int
    fits: bool
    longest_context: int | None
    largest_batch: int | None


def fit(
    layers: tuple[LayerCache, ...], *, memory: int, weights: int, tokens: int, batch_size: int
) -> Fit:
    """The greatest context and batch whose caches fit beside the weights.

    Raises:
        ConfigError: Not even the weights fit.
    """
    if weights > memory:
        raise ConfigError(
            f"memory must hold the weights of a rank, {weights:,} bytes: got {memory:,}; raise "
            f"memory or tensor_parallel, or take a narrower dtype"
        )
    free, kinds = memory - weights, Counter(layers)
    return Fit(
        memory=memory,
        free=free,
        fits=total_bytes(kinds, tokens, batch_size) <= free,
        longest_context=_greatest(lambda n: total_bytes(kinds, n, batch_size) <= free),
        largest_batch=_greatest(lambda n: n == 0 or total_bytes(kinds, tokens, n) <= free),
    )


def _greatest(fits: Callable[[int], bool]) -> int | None:
    """The greatest number that fits, where everything below does too; None: unlimited."""
    high = 1
    while fits(high):
        if high >= _MOST:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
