"""The caches of a model on many ranks, which agree on what is done with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from polyhead.caches import KeyValueCache, ModelCache, SequenceCache
from polyhead.caches.protocol import Counts, per_row
from polyhead.parallel.ranks import Ranks, agreed, check_same, fingerprint


class RanksCache(ModelCache):
    """The caches of a model on ranks that change them together: what one refuses, all refuse.

    Args:
        layers: As of ``ModelCache``.
        cross: As of ``ModelCache``.
        owner: As of ``ModelCache``.
        dimensions: The ranks that make the same calls.

    Attributes:
        history: A number that differs where what was done with the cache differs.
    """

    def __init__(
        self,
        layers: Sequence[SequenceCache],
        cross: Sequence[KeyValueCache],
        owner: str,
        dimensions: Sequence[Ranks],
    ) -> None:
        super().__init__(layers, cross, owner)
        self.dimensions, self.history = dimensions, 0

    def note(self, *done: object) -> None:
        """Adds to the history."""
        self.history = fingerprint(self.history, *done)

    def rollback(self, count: Counts) -> None:
        with self._told("rollback", count):
            for cache in self.layers:
                cache.check_rollback(count)
        super().rollback(count)

    def crop(self, length: Counts) -> None:
        with self._told("crop", length):
            per_row("length", length, len(self.lengths))
        super().crop(length)

    def reorder(
        self, rows: Sequence[int] | Tensor, context_rows: Sequence[int] | None = None
    ) -> None:
        with self._told("reorder", rows, context_rows):
            self.layers[0].check_rows(rows)
        super().reorder(rows, context_rows)

    def reset(self) -> None:
        super().reset()
        self.history = 0

    @contextmanager
    def _told(self, what: str, *arguments: object) -> Iterator[None]:
        """The ranks agree on a change of the cache; the block raises what this one refuses."""
        refused: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, other ranks must not wait
            refused = error
        before = self.history
        self.note(what, [x.tolist() if isinstance(x, Tensor) else x for x in arguments])
        facts = [self.history]

        def check(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
            name = f"{what} of a cache (its arguments, and what was done before)"
            check_same(ranks, name, [each for (each,) in found])

        checks = [(ranks, partial(check, ranks)) for ranks in self.dimensions]
        try:
            agreed(checks, f"{what} of a cache", facts, refused)
        except Exception:
            self.history = before
            raise
