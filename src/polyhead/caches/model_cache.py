"""The caches of a whole model: one per attention layer, changed together.

A decoder has one cache per layer, of whatever kind suits the layer; an encoder-decoder a second one
per layer for cross-attention, filled once, and the encoder's output they were computed from.

Shape letters: B batch, T tokens, S encoder tokens, E embed size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from os import PathLike
from typing import Self

import torch
from torch import Tensor

from polyhead.caches import files
from polyhead.caches.choice import Kind, layer_caches
from polyhead.caches.dense import DenseCache
from polyhead.caches.evicting import EvictingCache
from polyhead.caches.eviction import Evicting
from polyhead.caches.in_use import InUse, alone
from polyhead.caches.layer_cache import LayerCache
from polyhead.caches.protocol import Counts, KeyValueCache, SequenceCache, per_row
from polyhead.caches.sizes import Quantized
from polyhead.caches.stored import StoredCache
from polyhead.config import TransformerConfig
from polyhead.semantics.masks import Mask


class ModelCache:
    """The memory of one batch of sequences.

    Args:
        layers: The self-attention caches, one per layer; of any kinds.
        cross: The cross-attention caches, one per layer; empty without an encoder.
        owner: Which model they belong to, its configuration as JSON; checked by ``load``.

    Attributes:
        context: The encoder's output ``[B, S, E]`` once known; not counted in ``bytes``.
        context_mask: Which of its tokens may be looked at; None: all.
        coordinates: Of each token held, where tokens came at several (M-RoPE); 0: none did.
    """

    def __init__(
        self,
        layers: Sequence[SequenceCache],
        cross: Sequence[KeyValueCache] = (),
        owner: str = "",
    ) -> None:
        if not layers:
            raise ValueError("a ModelCache needs at least one layer's cache: got none")
        self.layers, self.cross, self.owner = tuple(layers), tuple(cross), owner
        self.in_use = InUse()
        self.context: Tensor | None = None
        self.context_mask: Mask | None = None
        self.coordinates = 0

    @classmethod
    def for_config(
        cls,
        config: TransformerConfig,
        *,
        capacity: int = 0,
        kind: Kind = "auto",
        page_size: int = 16,
        quantized: Quantized | None = None,
        spare: int = 0,
        evicting: Evicting | None = None,
    ) -> Self:
        """Empty caches for a model.

        Args:
            config: Configuration of the model.
            capacity: Tokens per row to make room for at once; it grows when more come.
            kind: ``"auto"``: rings for windowed layers, dense otherwise. ``"dense"`` and
                ``"paged"``: every layer keeps every token, so that any number can be rolled back.
            page_size: Page size of ``"paged"``.
            quantized: Quantize old tokens so; in a ring without sinks.
            spare: Tokens that a ring keeps beyond its window, to roll back that many and one; and
                snapshots of states, to roll back that many.
            evicting: Layers without a window evict keys so, which are lost: ``H2O(budget)``,
                ``SnapKV(budget)`` or ``StreamingLLM(budget)``; with ``"auto"``, and not quantized.

        Raises:
            ValueError: A number that cannot be, or a layer whose keys cannot be evicted, named.
        """
        chosen = layer_caches(
            config,
            kind=kind,
            page_size=page_size,
            quantized=quantized,
            spare=spare,
            evicting=evicting,
        )
        crossing = [layer for layer in config.layers if layer.crossing is not None]
        return cls(
            [
                EvictingCache(layer.layout, capacity)
                if isinstance(layer.layout, Evicting)
                else StoredCache(layer.layout, layer.storage, capacity)
                if layer.plain
                else LayerCache(
                    layer.memories,
                    layer.layout,
                    quantized=quantized,
                    capacity=capacity,
                    spare=spare,
                )
                for layer in chosen
            ],
            [DenseCache() for _ in crossing],
            config.to_json(),
        )

    @property
    def length(self) -> int:
        """Tokens of the longest row; the position of the next one if all rows are equally long."""
        return self.layers[0].length

    @property
    def lengths(self) -> list[int]:
        """Tokens of each batch row's sequence, those included that a window has forgotten."""
        return self.layers[0].lengths

    @property
    def capacity(self) -> int:
        """Tokens for which every layer has memory now; a ring's memory serves any number."""
        return min(cache.capacity for cache in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that the caches have allocated."""
        return sum(cache.bytes for cache in (*self.layers, *self.cross))

    @property
    def used_bytes(self) -> int:
        """The part of ``bytes`` that tokens use."""
        return sum(cache.used_bytes for cache in (*self.layers, *self.cross))

    @property
    def max_rollback(self) -> int:
        """Tokens that ``rollback`` can remove from every layer now; removing all always works."""
        return min(cache.max_rollback for cache in self.layers)

    @property
    def lost_positions(self) -> int:
        """Positions by which a text may be longer than the model's context, since its tokens stand
        at their places in the cache (``StreamingLLM``): those that every row has lost."""
        return min((n for cache in self._endless for n in cache.evicted), default=0)

    @property
    def endless(self) -> bool:
        """Whether texts may grow beyond the model's context (``StreamingLLM``)."""
        return bool(self._endless)

    @property
    def _endless(self) -> list[EvictingCache]:
        caches = (cache for cache in self.layers if isinstance(cache, EvictingCache))
        return [cache for cache in caches if cache.rotates_late]

    def check_owner(self, owner: str) -> None:
        """Raises unless the caches belong to a model.

        Args:
            owner: The model's configuration as JSON.

        Raises:
            ValueError: They were made for another configuration; names the first field that
                differs. Caches without an owner belong to any model with as many layers.
        """
        if self.owner and self.owner != owner:
            said = files.difference(
                json.loads(self.owner), json.loads(owner), "config", "in the cache"
            )
            raise ValueError(f"cache was made for another model: {said}")

    def next_positions(self, real: Tensor) -> Tensor:
        """Positions ``[B, T]`` for a batch with padding; see ``SequenceCache.next_positions``."""
        return self.layers[0].next_positions(real)

    @alone
    def reserve_slots(self, count: int = 1) -> bool:
        """Reserves slots in every layer (``StoredCache.reserve_slots``), which the caller writes.

        Args:
            count: Tokens of each row.

        Returns:
            False, and nothing is counted, unless every layer has room for them.
        """
        for done, cache in enumerate(self.layers):
            reserve_slots = None
            if isinstance(cache, StoredCache):
                with cache.in_use:
                    reserve_slots = cache.reserve_slots(None, count)
            if reserve_slots is None:
                for other in self.layers[:done]:
                    if isinstance(other, StoredCache):
                        other.release_slots()
                return False
        return True

    @alone
    def rollback(self, count: Counts) -> None:
        """Forgets the last ``count`` tokens of every layer; the encoder's stay.

        Args:
            count: One number, or one per batch row.

        Raises:
            ValueError: More than are held, or than some layer can take back; nothing is forgotten.
        """
        for cache in self.layers:
            cache.check_rollback(count)
        for cache in self.layers:
            cache.rollback(count)

    def crop(self, length: Counts) -> None:
        """Keeps the first ``length`` tokens of each row. Raises as ``rollback``."""
        held = self.lengths
        wanted = per_row("length", length, len(held))
        self.rollback([max(0, have - keep) for have, keep in zip(held, wanted, strict=True)])

    @alone
    def truncate(self, length: Counts) -> None:
        """Makes layers equal again after a call that failed between two of them.

        Forgets what any layer holds beyond ``length`` tokens, one number or one per row. Where a
        layer has already forgotten what was before (a long chunk in a ring), all layers are reset:
        empty, but never wrong.
        """
        touched = [cache for cache in self.layers if cache.lengths]
        if not touched:
            return
        batch = len(touched[0].lengths)
        wanted = per_row("length", length, batch)
        if len(touched) < len(self.layers):
            wanted = [0] * batch
        kept = [min(row) for row in zip(wanted, *(c.lengths for c in touched), strict=True)]
        try:
            for cache in touched:
                cache.crop(kept)
        except ValueError:
            for cache in touched:
                cache.reset()

    @alone
    def fork(self) -> Self:
        """An independent cache with the same content; paged layers share their pages."""
        other = copy.copy(self)
        other.in_use = InUse()
        other.layers = tuple(cache.fork() for cache in self.layers)
        other.cross = tuple(cache.fork() for cache in self.cross)
        return other

    @alone
    def reorder(
        self, rows: Sequence[int] | Tensor, context_rows: Sequence[int] | None = None
    ) -> None:
        """Row i becomes what row ``rows[i]`` was (beam search); the batch may grow or shrink.

        Args:
            rows: Which rows of tokens stay, in which order.
            context_rows: The same for the encoder's output, where several rows of tokens share one
                of it: B of them for B · K rows, those of a sentence side by side. Default ``rows``.

        Raises:
            ValueError: A row that is not there.
            UnsupportedError: A ``context_mask`` of a class that does not know its batch rows.
        """
        chosen = per_row("rows", rows if isinstance(rows, Tensor) else [*rows], len(rows))
        context = self.context
        self.layers[0].check_rows(chosen)
        kept = chosen if context_rows is None else [*context_rows]
        mask = None if self.context_mask is None else self.context_mask.of_rows(kept)
        for caches, moved in ((self.layers, chosen), (self.cross, kept)):
            for cache in caches:
                if cache.lengths and moved != [*range(len(cache.lengths))]:
                    cache.reorder(moved)
        if context is not None:
            self.context = context[torch.tensor(kept, device=context.device)]
        self.context_mask = mask

    @alone
    def reset(self) -> None:
        """Forgets everything, the encoder's output too; memory is kept for the next sequence."""
        for cache in self.layers:
            cache.reset()
        self.reset_context()
        self.coordinates = 0

    def reset_context(self) -> None:
        """Forgets the encoder's output and its keys and values in cross-attention."""
        for cache in self.cross:
            cache.reset()
        self.context = self.context_mask = None

    @alone
    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything held to a safetensors file, whole or not at all.

        Raises:
            ValueError: There is a ``context_mask``, which cannot be written, or tokens stand at
                several coordinates, which the file does not tell.
        """
        if self.coordinates and self.length:
            raise ValueError(
                f"a cache whose tokens have {self.coordinates} coordinates each cannot be saved: "
                "the file would not say so, and later calls would count its tokens as positions"
            )
        if self.context_mask is not None:
            raise ValueError(
                "a cache with a context_mask cannot be saved: a mask is not a tensor; give the "
                "encoder's tokens without padding"
            )
        extra = {} if self.context is None else {"context": self.context.contiguous()}
        files.write(path, self.owner, (*self.layers, *self.cross), extra)

    @alone
    def load(self, path: str | PathLike[str], device: torch.device | str = "cpu") -> None:
        """Loads what ``save`` wrote from a cache of the same model.

        Args:
            path: File that ``save`` wrote.
            device: Where the tensors go.

        Raises:
            CheckpointError: Not such a file, or of another model or other kinds of cache: says
                what differs, and the cache is as it was.
        """
        caches = *self.layers, *self.cross
        extra = files.read(path, self.owner, caches, torch.device(device), ("context",))
        self.context, self.context_mask, self.coordinates = extra.get("context"), None, 0

    def __repr__(self) -> str:
        return f"ModelCache({len(self.layers)} layers, {self.length} tokens, {self.bytes:,} bytes)"
