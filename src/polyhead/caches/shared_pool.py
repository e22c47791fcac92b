"""Rows of a model that come and go by reference, within one pool of pages for each layer.

A row is read into a cache of its own and joins the others' cache without a copy; runs of full pages
outlive their rows, and other rows begin with them. All layers count the same tokens, so one number
of pages holds for each. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyhead.caches.layer_kv import LayerKV
from polyhead.caches.model_cache import ModelCache
from polyhead.caches.pages import Pages
from polyhead.caches.stored import StoredCache
from polyhead.errors import UnsupportedError

Page = tuple[int, ...]
"""A page of each layer, which together hold the same tokens."""


class SharedPool:
    """The pools of a cache.

    Args:
        cache: A paged cache of one row, which holds some tokens; they are forgotten.

    Attributes:
        page_size: Tokens of a page.
        pages: Pages that there are; the pools grow beyond them only if more rows need them.

    Raises:
        UnsupportedError: A layer that keeps more than exact tokens in pages.
    """

    def __init__(self, cache: ModelCache) -> None:
        cache.rollback(cache.lengths)
        self._empty = cache
        first = _pages_of(cache)[0]
        self.page_size, self.pages = first.pool.page, len(first.pool.references)

    @property
    def free(self) -> int:
        """Pages that no row has."""
        found = _pages_of(self._empty)
        for pages in found:
            pages.pool.collect()
        return min(len(pages.pool.free) for pages in found)

    @property
    def bytes(self) -> int:
        """Bytes of the pools."""
        return self._empty.bytes

    def row(self, prefix: Sequence[Page] = ()) -> ModelCache:
        """A cache of one row, which begins with some full pages."""
        made = self._empty.fork()
        if prefix:
            tokens = len(prefix) * self.page_size
            for layer, pages in zip(made.layers, zip(*prefix, strict=True), strict=True):
                _add(layer, [pages], [tokens])
            made.reorder([1])
        return made

    def join(self, cache: ModelCache, other: ModelCache) -> None:
        """Adds the rows of another cache of this pool; they are then no more in the other."""
        moved = [(pages.table, pages.stops) for pages in _pages_of(other)]
        for layer, (table, stops) in zip(cache.layers, moved, strict=True):
            _add(layer, table, stops)
        other.reset()

    def pages_of(self, cache: ModelCache, row: int, tokens: int) -> list[Page]:
        """The full pages among those of a row's first tokens."""
        count = tokens // self.page_size
        return [*zip(*(pages.table[row][:count] for pages in _pages_of(cache)), strict=True)]

    def keep(self, page: Page) -> None:
        """Keeps a page, whatever becomes of its rows, until ``release``."""
        for number, pages in zip(page, _pages_of(self._empty), strict=True):
            with pages.pool.lock:
                pages.pool.share([number])

    def release(self, page: Page) -> None:
        for number, pages in zip(page, _pages_of(self._empty), strict=True):
            with pages.pool.lock:
                pages.pool.release([number])

    def is_idle(self, page: Page) -> bool:
        """Whether no row has a page that was kept once."""
        return _pages_of(self._empty)[0].pool.references[page[0]] == 1


def _contents(layer: object) -> LayerKV:
    contents = layer._contents if isinstance(layer, StoredCache) else None
    if contents is None or contents.paged is None or contents.has_positions:
        raise UnsupportedError(
            "rows join by reference where every layer keeps exact tokens in pages: got "
            f"{type(layer).__name__}"
        )
    return contents


def _pages_of(cache: ModelCache) -> list[Pages]:
    found = [_contents(layer).paged for layer in cache.layers]
    return [pages for pages in found if pages is not None]


def _add(layer: object, table: Sequence[Sequence[int]], stops: Sequence[int]) -> None:
    contents = _contents(layer)
    assert isinstance(layer, StoredCache)
    contents.extend(table, stops)
    layer._lengths = [*layer._lengths, *stops]
