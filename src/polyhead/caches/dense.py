"""The dense cache: keys and values in order, in two tensors that double as they fill."""

from __future__ import annotations

from polyhead.caches.stored import StoredCache


class DenseCache(StoredCache):
    """Remembers every token of one layer.

    Doubling reallocates at most log2(length) times. Keys are moved before the room for values is
    made, so at the peak of a growth 1.25 times the new capacity is alive where values have the size
    of keys, 1.5 times at most; more only if a caller keeps a source of before.

    Args:
        capacity: Tokens to make room for at the first append; it grows when more come.

    Raises:
        ValueError: A negative capacity.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity=capacity)
