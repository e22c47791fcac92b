"""Rows of a model that come and go by reference, within one pool of pages for each layer.

A row is read into a cache of its own and joins the others' cache without a copy; runs of full pages
outlive their rows, and other rows begin with them. All layers count the same tokens, so one number
of pages holds for each. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyhead._utils.checks import check_int
from polyhead.caches.model_cache import ModelCache
from polyhead.caches.page_pool import PagePool
from polyhead.caches.stored import StoredCache
from polyhead.errors import UnsupportedError

Page = tuple[int, ...]
"""A page of each layer, which together hold the same tokens."""


class SharedPool:
    """One pool of pages for each layer of a model, with a limit.

    What needs more pages than are free raises ``CacheFullError``, and changes nothing.

    Args:
        cache: A paged cache of one row, which holds some tokens; they are forgotten.
        pages: Pages of a layer at most; None: as many as the cache has memory for.

    Attributes:
        page_size: Tokens of a page.
        pages: As above.

    Raises:
        UnsupportedError: A layer that keeps more than exact tokens in pages.
        ValueError: No page.
    """

    def __init__(self, cache: ModelCache, pages: int | None = None) -> None:
        cache.rollback(cache.lengths)
        self._empty, self._layers = cache, _layers_of(cache)
        self._pools = [_pool_of(layer) for layer in self._layers]
        self.page_size = self._pools[0].page
        if pages is None:
            pages = len(self._pools[0].references)
        self.pages = check_int("pages", pages, least=1, error=ValueError)
        for pool in self._pools:
            pool.limit = self.pages

    @property
    def free(self) -> int:
        """Pages that no row has, and that are not kept."""
        return min(pool.available for pool in self._pools)

    @property
    def bytes(self) -> int:
        """Bytes that the pools have allocated."""
        return self._empty.bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers."""
        return sum(pool.page_bytes for pool in self._pools)

    def row(self, prefix: Sequence[Page] = ()) -> ModelCache:
        """A cache of one row, which begins with some full pages."""
        made = self._empty.fork()
        if prefix:
            tokens = len(prefix) * self.page_size
            for layer, pages in zip(_layers_of(made), zip(*prefix, strict=True), strict=True):
                layer.append_rows([pages], [tokens])
            made.reorder([1])
        return made

    def join(self, cache: ModelCache, other: ModelCache) -> None:
        """Moves all rows of a cache of this pool into another, without a copy.

        Args:
            cache: Gets them, after its own.
            other: Is then empty.
        """
        for layer, moved in zip(_layers_of(cache), _layers_of(other), strict=True):
            if moved.pages is not None:
                layer.append_rows(moved.pages.table, moved.pages.stops)
        other.reset()

    def pages_of(self, cache: ModelCache, row: int, tokens: int) -> list[Page]:
        """The full pages among those of a row's first tokens."""
        count = tokens // self.page_size
        tables = [layer.pages.table for layer in _layers_of(cache) if layer.pages is not None]
        return [*zip(*(table[row][:count] for table in tables), strict=True)]

    def keep(self, page: Page) -> None:
        """Keeps a page, whatever becomes of its rows, until ``release``."""
        for number, pool in zip(page, self._pools, strict=True):
            with pool.lock:
                pool.share([number])

    def release(self, page: Page) -> None:
        """Gives a page back that was kept, once no row has it."""
        for number, pool in zip(page, self._pools, strict=True):
            with pool.lock:
                pool.release([number])

    def is_idle(self, page: Page) -> bool:
        """Whether no row has a page that was kept once."""
        return self._pools[0].references[page[0]] == 1

    def shrink(self) -> int:
        """Gives back the memory behind the last page in use; returns its bytes.

        The pools grow again, up to the limit, as pages are taken.
        """
        return sum(pool.shrink() for pool in self._pools)


def _layers_of(cache: ModelCache) -> list[StoredCache]:
    found = []
    for layer in cache.layers:
        if not isinstance(layer, StoredCache) or layer.pages is None:
            raise UnsupportedError(
                "rows join by reference where every layer keeps exact tokens in pages: got "
                f"{type(layer).__name__}"
            )
        found.append(layer)
    return found


def _pool_of(layer: StoredCache) -> PagePool:
    assert layer.pages is not None
    return layer.pages.pool
