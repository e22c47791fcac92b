"""The caches of a whole model: one per attention layer, moved together.

A decoder has one cache per layer; an encoder-decoder a second one per layer for cross-attention,
filled once, and the encoder's output they were computed from.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyhead.caches.protocol import KeyValueCache
from polyhead.semantics.masks import Mask


class ModelCache:
    """The memory of one batch of sequences.

    Args:
        layers: The self-attention caches, one per layer.
        cross: The cross-attention caches, one per layer; empty without an encoder.

    Attributes:
        context: The encoder's output ``[B, S, E]`` once known; not counted in ``bytes``.
        context_mask: Which of its tokens may be looked at; None: all.
    """

    def __init__(
        self, layers: Sequence[KeyValueCache], cross: Sequence[KeyValueCache] = ()
    ) -> None:
        if not layers:
            raise ValueError("a ModelCache needs at least one layer's cache: got none")
        self.layers, self.cross = tuple(layers), tuple(cross)
        self.context: Tensor | None = None
        self.context_mask: Mask | None = None

    @property
    def length(self) -> int:
        """Tokens held by each layer."""
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        """Tokens for which every layer has memory now."""
        return min(cache.capacity for cache in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that the caches have allocated."""
        return sum(cache.bytes for cache in (*self.layers, *self.cross))

    @property
    def used_bytes(self) -> int:
        """Bytes that the tokens held take of them."""
        return sum(cache.used_bytes for cache in (*self.layers, *self.cross))

    def rollback(self, count: int) -> None:
        """Forgets the last ``count`` tokens of every layer; the encoder's stay.

        Raises:
            ValueError: Fewer are held, or ``count`` is negative; nothing is forgotten.
        """
        if not 0 <= count <= self.length:
            raise ValueError(
                f"rollback count must be 0 to length={self.length} tokens: got {count}"
            )
        self.truncate(self.length - count)

    def truncate(self, length: int) -> None:
        """Forgets what any layer holds beyond ``length`` tokens."""
        for cache in self.layers:
            if cache.length > length:
                cache.rollback(cache.length - length)

    def reset(self) -> None:
        """Forgets everything, the encoder's output too; memory is kept for the next sequence."""
        for cache in self.layers:
            cache.reset()
        self.reset_context()

    def reset_context(self) -> None:
        """Forgets the encoder's output and what cross-attention keeps of it."""
        for cache in self.cross:
            cache.reset()
        self.context = self.context_mask = None

    def __repr__(self) -> str:
        return f"ModelCache({len(self.layers)} layers, {self.length} tokens, {self.bytes:,} bytes)"
