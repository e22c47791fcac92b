"""Caches and pools of pages of a model that one rank leads: what changes them, all ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.caches.protocol import Counts
from polyhead.caches.shared_pool import Page, SharedPool
from polyhead.parallel.model_cache import RanksCache

if TYPE_CHECKING:
    from polyhead.parallel.leading import Leader


class LedCache(RanksCache):
    """A cache whose changes the other ranks are told."""

    def __init__(self, cache: ModelCache, leader: Leader) -> None:
        super().__init__(cache.layers, cache.cross, cache.owner, [leader.ranks])
        self._leader = leader

    def rollback(self, count: Counts) -> None:
        self._leader.call(self, "rollback", super().rollback, count)

    def crop(self, length: Counts) -> None:
        self._leader.call(self, "crop", super().crop, length)

    def reorder(
        self, rows: Sequence[int] | Tensor, context_rows: Sequence[int] | None = None
    ) -> None:
        self._leader.call(self, "reorder", super().reorder, rows, context_rows)

    def reset(self) -> None:
        self._leader.call(self, "reset", super().reset)

    def fork(self) -> Self:
        made: Self = self._leader.call(self, "fork", super().fork)
        return made


class LedPool(SharedPool):
    """A pool whose changes the other ranks are told; they have the same pages of their own."""

    def __init__(self, cache: ModelCache, pages: int | None = None, *, leader: Leader) -> None:
        self._leader = leader

        def made(pages: int | None) -> SharedPool:
            SharedPool.__init__(self, cache, pages)
            return self

        leader.call(cache, "pool", made, pages)

    def row(self, prefix: Sequence[Page] = ()) -> ModelCache:
        return self._leader.call(self, "row", super().row, prefix)

    def join(self, cache: ModelCache, other: ModelCache) -> None:
        self._leader.call(self, "join", super().join, cache, other)

    def keep(self, page: Page) -> None:
        self._leader.call(self, "keep", super().keep, page)

    def release(self, page: Page) -> None:
        self._leader.call(self, "release", super().release, page)

    def shrink(self) -> int:
        return self._leader.call(self, "shrink", super().shrink)
