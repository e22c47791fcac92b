"""Counts of the tokens of several layers' caches, which move together from token to token.

Every cache counts its own tokens, in lists that are never changed in place: what counts otherwise
makes another list. Caches that grow together can therefore hold the same one, and as long as each
still does, nothing has happened to any of them alone: no append, no rollback, no reordering, no
growth of its memory. Finding that out takes two comparisons a layer, and counting a token two
assignments.

Shape letters: B batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeGuard

from polyhead.caches.memory import Rows
from polyhead.caches.protocol import SequenceCache
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
        self._lengths = caches[0].lengths
        for cache in caches:
            cache.join(self._lengths)

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

    def are(self, caches: Sequence[SequenceCache | None]) -> TypeGuard[Sequence[StoredCache]]:
        """Whether these are the caches, in the same order, with the methods of their classes."""
        fields, members = self._fields, self._members
        if len(caches) != len(members):
            return False
        for cache, (member, kind) in zip(caches, members, strict=True):
            if cache is not member() or type(cache) is not kind or len(cache.__dict__) != fields:
                return False
        return True

    @property
    def length(self) -> int:
        """Tokens of every row."""
        return self._lengths[0]

    def memories(self, caches: Sequence[StoredCache]) -> list[Rows] | None:
        """Where tokens of the locked caches lie; None if anything but ``count`` counted some."""
        lengths, found = self._lengths, []
        for cache in caches:
            contents = cache._contents
            if cache._lengths is not lengths or contents is None:
                return None
            rows = contents.exact
            if rows is None or rows.stops is not lengths:
                return None
            found.append(rows)
        return found

    def count(self, caches: Sequence[StoredCache], memories: Sequence[Rows], more: int) -> None:
        """Counts tokens that were written to each row of some of the caches, the first ones."""
        self._lengths = lengths = [self._lengths[0] + more] * len(self._lengths)
        for cache, memory in zip(caches, memories, strict=False):
            cache._lengths = memory.stops = lengths
