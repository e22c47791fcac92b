"""What a key/value cache promises, whatever it does inside.

``append`` takes the keys and values of new tokens and returns a source of everything remembered,
ready for ``attention(q, source)``. A cache holds what it was given: rotary embedding has been
applied before. Nothing outside may know how the tokens lie in memory.

Shape letters: B batch, G kv heads, T new tokens, D key size, V value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from polyhead.semantics.sources import KeyValueSource


class KeyValueCache(ABC):
    """The keys and values of one attention layer."""

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> KeyValueSource:
        """Remembers the keys and values of T more tokens.

        Args:
            k: ``[B, G, T, D]``, any strides.
            v: ``[B, G, T, V]``, any strides.
            positions: ``[T]`` or ``[B, T]`` absolute positions; default: they follow on from the
                tokens held, counted from 0.

        Returns:
            All keys and values held, the new ones last in place.

        Raises:
            ValueError: Batch, heads, sizes, dtype, device or positions do not fit what is held;
                the message names which, and the cache is as it was.
        """

    @abstractmethod
    def source(self) -> KeyValueSource:
        """All keys and values held. Raises ValueError where nothing has been appended."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens held."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens for which there is memory now; an unbounded cache grows by itself."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of all tensors allocated."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that the tokens held take of them."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Forgets the last ``count`` tokens; raises ValueError for more than are held."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets all tokens; memory may be kept for the next ones."""
