"""Rows that are computed in one call: as many tokens as a native step takes.

Each batch has a cache; all lie in one pool of pages, so rows join and leave by reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyhead.caches import ModelCache
from polyhead.caches.shared_pool import SharedPool
from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.serving.row import Row


class Batch:
    """Rows and their cache."""

    def __init__(self, cache: ModelCache, rows: list[Row]) -> None:
        self.cache, self.rows = cache, rows

    @property
    def tokens(self) -> int:
        """Tokens that its rows are to read next: the last of each, or what is left of a prompt."""
        return sum(row.length - row.fed for row in self.rows)


class Batches:
    """The rows that have read their prompts, or read the rest beside others.

    Args:
        pool: What their caches lie in.
    """

    def __init__(self, pool: SharedPool) -> None:
        self._pool, self._batches = pool, list[Batch]()

    def add(self, row: Row) -> None:
        """Takes a row and its cache."""
        cache, row.cache = row.cache, None
        assert cache is not None
        self._batches.append(Batch(cache, [row]))

    def join(self, batch: Batch, row: Row) -> None:
        """Puts a row and its cache into a batch."""
        cache, row.cache = row.cache, None
        assert cache is not None
        self._pool.join(batch.cache, cache)
        batch.rows.append(row)

    def drop(self, rows: Sequence[Row]) -> None:
        """Takes rows out, and gives their pages back; those of others do not matter."""
        for batch in self._batches:
            left = [place for place, row in enumerate(batch.rows) if row not in rows]
            if not left:
                batch.cache.reset()
            elif len(left) < len(batch.rows):
                batch.cache.reorder(left)
            batch.rows = [batch.rows[place] for place in left]
        self._batches = [batch for batch in self._batches if batch.rows]

    def gathered(self) -> list[Batch]:
        """All of them, small ones put together."""
        found: list[Batch] = []
        for batch in sorted(self._batches, key=lambda each: -len(each.rows)):
            size = batch.tokens
            into = next((b for b in found if b.tokens + size <= MAX_STEP_ROWS), None)
            if into is None:
                found.append(batch)
            else:
                self._pool.join(into.cache, batch.cache)
                into.rows += batch.rows
        self._batches = found
        return [*found]
