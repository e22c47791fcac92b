"""Counts of the tokens of several layers' caches, which move together from token to token.

Every cache counts its own tokens, in lists that are never changed in place: what counts otherwise
makes another list. Caches that grow together can therefore hold the same one, and as long as each
still does, nothing has happened to any of them alone: no append, no rollback, no reordering, no
growth of its memory. Finding that out takes a comparison a layer, and counting a token two
assignments.

Shape letters: B batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeGuard

from polyhead.caches.protocol import KeyValueCache
from polyhead.caches.stored import StoredCache


class Together:
    """Caches whose exact tokens lie in rows, all of the same length. Holds them weakly.

    Args:
        caches: One for each layer, locked by the caller; each ``fits``.
        fields: Attributes of each; one more stands for a method that was replaced.
    """

    __slots__ = ("_fields", "_lengths", "_members")

    def __init__(self, caches: Sequence[StoredCache], fields: int) -> None:
        self._fields = fields
        self._members = [(weakref.ref(cache), type(cache)) for cache in caches]
        self._lengths: list[int] = []
        self._set(caches, caches[0].lengths)

    @staticmethod
    def fits(caches: Sequence[StoredCache]) -> bool:
        """Whether all hold equally many exact tokens without positions, in rows in order."""
        lengths = caches[0]._lengths
        return lengths.count(lengths[0]) == len(lengths) and all(
            cache._lengths == lengths
            and (contents := cache._contents) is not None
            and (rows := contents.exact) is not None
            and rows.stops == lengths
            and not any(rows.firsts)
            and not contents.has_positions
            for cache in caches
        )

    def are(self, caches: Sequence[KeyValueCache | None]) -> TypeGuard[Sequence[StoredCache]]:
        """Whether these are the caches, in the same order, with the methods of their classes."""
        fields, members = self._fields, self._members
        if len(caches) != len(members):
            return False
        for cache, (member, kind) in zip(caches, members, strict=True):
            if cache is not member() or type(cache) is not kind or len(cache.__dict__) != fields:
                return False
        return True

    def length(self, caches: Sequence[StoredCache]) -> int | None:
        """Tokens of every row, if only ``count`` has changed the caches, which are locked."""
        lengths = self._lengths
        for cache in caches:
            contents = cache._contents
            if cache._lengths is not lengths or contents is None:
                return None
            rows = contents.exact
            if rows is None or rows.stops is not lengths:
                return None
        return lengths[0]

    def count(self, caches: Sequence[StoredCache], count: int) -> None:
        """Counts tokens that were written to each row of the caches, or of the first of them."""
        self._set(caches, [self._lengths[0] + count] * len(self._lengths))

    def _set(self, caches: Sequence[StoredCache], lengths: list[int]) -> None:
        for cache in caches:
            contents = cache._contents
            assert contents is not None
            assert contents.exact is not None
            cache._lengths = contents.exact.stops = lengths
            cache._undo = None  # what it would take back is what was before
        self._lengths = lengths
