"""Rows that are decoded together: each has the bits that it has alone, beside up to seven others.

All caches are forks of one paged cache, so a row joins a batch and leaves it by reference. A model
with a state, a window's ring or another cache that cannot be joined is decoded row by row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.errors import UnsupportedError
from polyhead.generation import LanguageModel

TOGETHER = 8
"""Rows whose bits in one native step do not depend on each other."""


class Row(Protocol):
    """What a batch needs of a request.

    Attributes:
        cache: Its tokens but the last; None once it is in a batch.
        ids: New tokens; the last is the next input.
        ended: Whether it needs no more.
    """

    cache: ModelCache | None
    ids: list[int]
    ended: bool

    def take(self, logits: Tensor) -> None:
        """Draws the next token of ``[1, V]``."""

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""


class _Batch:
    def __init__(self, cache: ModelCache, rows: list[Row]) -> None:
        self.cache, self.rows = cache, rows


class Batches:
    """The live rows of an engine, in batches of up to eight.

    Args:
        model: A decoder in evaluation mode.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._batches = model, list[_Batch]()
        self._empty = self._first_cache()

    @property
    def join(self) -> bool:
        """Whether rows of this model can be decoded together."""
        return self._empty is not None

    def new_cache(self, tokens: int) -> ModelCache:
        """An empty cache for one row of so many tokens."""
        return self._model.new_cache(tokens) if self._empty is None else self._empty.fork()

    def add(self, row: Row) -> None:
        """Takes a row that has its first token."""
        cache, row.cache = row.cache, None
        assert cache is not None
        self._batches.append(_Batch(cache, [row]))

    def step(self) -> None:
        """One token for every row that has not ended."""
        self._leave()
        self._gather()
        for batch in self._batches:
            ids = torch.tensor([row.ids[-1:] for row in batch.rows])
            try:
                with torch.inference_mode():
                    logits = self._model(ids, cache=batch.cache, last=1)[:, -1]
            except Exception as error:  # as when memory ran out: other batches go on
                for row in batch.rows:
                    row.fail(error)
                continue
            for i, row in enumerate(batch.rows):
                row.take(logits[i : i + 1])
        self._leave()

    def _leave(self) -> None:
        """Lets go of rows that have ended."""
        for batch in self._batches:
            kept = [i for i, row in enumerate(batch.rows) if not row.ended]
            if kept and len(kept) < len(batch.rows):
                batch.cache.reorder(kept)
            batch.rows = [batch.rows[i] for i in kept]
        self._batches = [batch for batch in self._batches if batch.rows]

    def _gather(self) -> None:
        """Puts small batches together."""
        if self._empty is None:
            return
        gathered: list[_Batch] = []
        for batch in sorted(self._batches, key=lambda each: -len(each.rows)):
            size = len(batch.rows)
            into = next((b for b in gathered if len(b.rows) + size <= TOGETHER), None)
            if into is None:
                gathered.append(batch)
            else:
                into.cache.join(batch.cache)
                into.rows += batch.rows
        self._batches = gathered

    @torch.inference_mode()
    def _first_cache(self) -> ModelCache | None:
        """An empty paged cache that rows are forks of; None where they could not be joined."""
        cache = self._model.transformer.new_cache(kind="paged")
        self._model(torch.zeros(1, 1, dtype=torch.int64), cache=cache, last=1)
        cache.reset()
        try:
            cache.fork().join(cache.fork())
        except UnsupportedError:
            return None
        return cache
