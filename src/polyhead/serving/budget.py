"""Which requests there is memory for.

Pages are promised to live requests, kept for later ones (prefixes), or free. A request is let in
when what it may need is free, or becomes free by giving up prefixes that no request has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as remembered
from typing import TypeAlias

import torch

from polyhead.caches import ModelCache
from polyhead.caches.shared_pool import Page, SharedPool
from polyhead.errors import UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.models import MultiTokenPredictor, Transformer
from polyhead.planning.memory import free_memory, token_bytes
from polyhead.serving.prefixes import Prefixes
from polyhead.serving.row import Row
from polyhead.serving.split import split_of
from polyhead.serving.stats import Counts, EngineStats

_SHARE = 0.5
"""Part of the free memory that caches may take by default."""


Cached: TypeAlias = LanguageModel | MultiTokenPredictor
"""What remembers tokens."""


def fitting_tokens(models: Sequence[Cached], rows: int) -> int:
    """Tokens of all caches by default: what fits, and no more than so many whole contexts.

    Args:
        models: Those whose caches hold them; the context is that of the first.
        rows: How many contexts.
    """
    split = split_of(_transformer(models[0]))
    free = free_memory() if split is None else split.free_memory
    fitting = int(free * _SHARE) // max(1, sum(map(_token_bytes, models)))
    return max(1, min(fitting, rows * models[0].config.max_positions))


def _transformer(model: Cached) -> Transformer:
    return model.model if isinstance(model, MultiTokenPredictor) else model.transformer


def _token_bytes(model: Cached) -> int:
    """Bytes of a token on this process."""
    transformer = _transformer(model)
    split, dtype = split_of(transformer), str(transformer.embedding.like.dtype)
    ranks = 1 if split is None else split.ranks
    return token_bytes(model.config, dtype.removeprefix("torch."), ranks)


class Budget:
    """The tokens of all caches of a model, and who has them.

    Args:
        model: A decoder, or what predicts tokens beside one.
        tokens: Tokens of all caches together.
        page_size: Tokens of a page.
        share_prefixes: Whether full pages of prompts are kept for later requests.
        overcommit: Whether a row counts with the tokens it has and one more, not with its limit.

    Attributes:
        tokens, page_size: As above.
        pool: The pages; None where a layer of the model cannot lie in pages.
        prefixes: The prefixes that are kept; None: none are.
    """

    def __init__(
        self,
        model: Cached,
        tokens: int,
        page_size: int,
        *,
        share_prefixes: bool,
        overcommit: bool,
    ) -> None:
        self._model, self._overcommit = model, overcommit
        self.tokens, self.page_size = tokens, page_size
        self.pool = self._new_pool()
        self.prefixes = Prefixes(self.pool) if share_prefixes and self.pool else None

    def _new_pool(self) -> SharedPool | None:
        size = self.pages(self.tokens) * self.page_size
        cache = self._model.new_cache(size, kind="paged", page_size=self.page_size)
        ids = torch.zeros(1, 1, dtype=torch.int64)  # a first token settles shapes and dtypes
        if isinstance(self._model, MultiTokenPredictor):
            like = _transformer(self._model).embedding.like
            hidden = like.new_zeros(1, 1, self._model.config.embed_dim)
            self._model.hidden_states(ids, hidden, cache=cache)
        else:
            self._model.transformer(ids, cache=cache, last=1)
        split = split_of(_transformer(self._model))
        try:
            return SharedPool(cache) if split is None else split.new_pool(cache)
        except UnsupportedError:
            return None

    @property
    def bytes(self) -> int:
        """Bytes of all tokens."""
        pages = self.pages(self.tokens)
        if self.pool is not None:
            return pages * self.pool.page_bytes
        return pages * self.page_size * _token_bytes(self._model)

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens of one row."""
        return -(-tokens // self.page_size)

    def used(self, rows: Sequence[Row]) -> int:
        """Tokens that rows have room for, in whole pages."""
        total = self.pages(self.tokens)
        promised = sum(self.pages(self._wanted(row)) for row in rows)
        return min(promised, total) * self.page_size  # rows share pages

    def stats(self, rows: Sequence[Row], queued: int, counts: Counts) -> EngineStats:
        """Counts of now, of the rows that are computed and the number of those that wait."""
        live = [row for row in rows if not row.ended]
        used = self.used(live)
        return EngineStats(
            live=len(live),
            queued=queued,
            used_tokens=used,
            free_tokens=self.pages(self.tokens) * self.page_size - used,
            pool_bytes=self.bytes,
            **vars(counts),
        )

    def cache_for(self, row: Row, rows: Sequence[Row]) -> tuple[ModelCache, int] | None:
        """A cache for one more row, and how many of its tokens that holds.

        Args:
            row: It.
            rows: Those that are computed.

        Returns:
            None where there is no room.
        """
        return self.allocator(rows)(row)

    def allocator(self, rows: Sequence[Row]) -> Callable[[Row], tuple[ModelCache, int] | None]:
        """``cache_for`` of rows that wait, up to the first that has room: what is free is counted
        once for all.
        """
        pool, prefixes = self.pool, self.prefixes
        if pool is None:
            free = self.tokens - sum(each.tokens for each in rows)
            return lambda row: (
                (self._model.new_cache(row.tokens), 0) if row.tokens <= free else None
            )
        unclaimed = self._unclaimed(rows)
        idle = remembered(set[Page] if prefixes is None else prefixes.idle)

        def cache_for(row: Row) -> tuple[ModelCache, int] | None:
            prefix = prefixes.find(row.all_ids, row.sharing) if prefixes is not None else []
            lacking = self.pages(self._wanted(row)) - len(prefix) - unclaimed
            if lacking > 0 and lacking > len(idle().difference(prefix)):
                return None
            cache = pool.row(prefix)
            if lacking > 0 and prefixes is not None:
                prefixes.evict(lacking)
            return cache, len(prefix) * self.page_size

        return cache_for

    def keep_prefix(self, row: Row, cache: ModelCache, place: int) -> None:
        """Keeps the full pages of a row's tokens, at a place of a cache, for later requests."""
        if self.pool is not None and self.prefixes is not None:
            pages = self.pool.pages_of(cache, place, row.fed)
            self.prefixes.add(row.all_ids[: row.fed], row.sharing, pages)

    def has_room(self, rows: Sequence[Row]) -> bool:
        """Whether each of the rows can have one more token, if need be without kept prefixes."""
        if self.pool is None or not self._overcommit:
            return True
        lacking = -self._unclaimed(rows)
        if lacking > 0 and self.prefixes is not None:
            lacking -= self.prefixes.evict(lacking)
        return lacking <= 0

    def spare(self, rows: Sequence[Row], of: Sequence[Row]) -> int:
        """Tokens that each of the rows ``of`` can have beyond those that rows go on with."""
        most = max(row.left for row in of)
        if not self._overcommit:
            return most
        return max(0, min(most, self._unclaimed(rows) // len(of) * self.page_size))

    def forget_prefixes(self) -> None:
        """Gives up all prefixes that no row has, and the memory of free pages."""
        if self.prefixes is not None:
            self.prefixes.evict(self.pages(self.tokens))
        if self.pool is not None:
            self.pool.shrink()

    def _wanted(self, row: Row) -> int:
        """Tokens that there must be room for before a row goes on."""
        return row.length + 1 if self._overcommit else row.tokens

    def _held(self, row: Row) -> int:
        """Tokens that a row's cache holds."""
        return row.fed

    def _unclaimed(self, rows: Sequence[Row]) -> int:
        """Free pages that none of the rows is going to need."""
        assert self.pool is not None
        claims = sum(self.pages(self._wanted(row)) - self.pages(self._held(row)) for row in rows)
        return self.pool.free - claims
