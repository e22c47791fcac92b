"""Pools with a limit: what does not fit is refused and harms nobody, and memory is given back."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from generation.tiny import decoder
from polyhead.caches import DenseCache, ModelCache, PagedCache
from polyhead.caches.page_pool import PagePool
from polyhead.caches.shared_pool import SharedPool
from polyhead.errors import CacheFullError, UnsupportedError
from polyhead.models import Transformer

PAGE = 4


@pytest.fixture(scope="module")
def model() -> Transformer:
    return decoder(context=256).eval()


def read(model: Transformer, cache: ModelCache, ids: list[list[int]]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor(ids), cache=cache, last=1)
    return logits[:, -1]


def pool_of(model: Transformer, pages: int | None, capacity: int = PAGE) -> SharedPool:
    options: dict[str, Any] = {"capacity": capacity, "kind": "paged", "page_size": PAGE}
    cache = ModelCache.for_config(model.config, **options)
    read(model, cache, [[0]])
    return SharedPool(cache, pages)


@pytest.mark.parametrize("steps", [1, 30], ids=["native step", "modules"])
def test_what_needs_more_pages_than_are_free_is_refused_and_changes_nothing(
    model: Transformer, steps: int
) -> None:
    pool = pool_of(model, 6)
    first, second = pool.row(), pool.row()
    read(model, first, [[*range(2 * PAGE)]])
    read(model, second, [[*range(4 * PAGE)]])
    assert pool.free == 0
    with pytest.raises(CacheFullError, match=r"needs . more pages of 4 tokens: 0 of 6 are free"):
        read(model, first, [[1] * steps])
    assert (first.lengths, second.lengths, pool.free) == ([8], [16], 0)
    assert {layer.length for layer in first.layers} == {8}
    second.reset()
    assert pool.free == 4
    after, alone = read(model, first, [[5]]), pool_of(model, 6).row()
    read(model, alone, [[*range(2 * PAGE)]])
    assert torch.equal(after, read(model, alone, [[5]]))


def test_a_pool_grows_to_its_limit_and_no_further(model: Transformer) -> None:
    pool = pool_of(model, 5)
    assert (pool.pages, pool.free, pool.bytes) == (5, 5, pool.page_bytes)
    row = pool.row()
    for count in range(1, 6):
        read(model, row, [[1] * PAGE])
        assert pool.free == 5 - count
    assert pool.bytes == 5 * pool.page_bytes
    assert pool_of(model, None, 3 * PAGE).pages == 3
    with pytest.raises(ValueError, match="pages must be a whole number of at least 1"):
        pool_of(model, 0)


def test_memory_behind_the_last_page_in_use_is_given_back(model: Transformer) -> None:
    pool = pool_of(model, 40)
    kept, others = pool.row(), pool.row()
    read(model, kept, [[*range(2 * PAGE)]])
    read(model, others, [[1] * 20 * PAGE])
    before, same = pool.bytes, kept.fork()
    others.reset()
    assert pool.shrink() == before - 2 * pool.page_bytes
    assert (pool.bytes, pool.free) == (2 * pool.page_bytes, 38)
    assert pool.shrink() == 0
    found = read(model, kept, [[7]])  # grows again
    read(model, others, [[2] * 37 * PAGE])
    alone = pool_of(model, 3).row()
    read(model, alone, [[*range(2 * PAGE)]])
    assert torch.equal(found, read(model, alone, [[7]]))
    kept.reset()
    assert torch.equal(read(model, same, [[7]]), found)
    for cache in (same, others):
        cache.reset()
    pool.shrink()
    assert (pool.bytes, pool.free) == (0, 40)


def test_pages_that_are_kept_outlive_their_rows(model: Transformer) -> None:
    pool = pool_of(model, 8)
    row = pool.row()
    read(model, row, [[*range(10)]])
    pages = pool.pages_of(row, 0, 10)
    assert len(pages) == 2
    for page in pages:
        pool.keep(page)
    row.reset()
    pool.shrink()
    assert pool.free == 6
    again = pool.row(pages)
    assert again.lengths == [8]
    assert not pool.is_idle(pages[0])
    found = read(model, again, [[8, 9]])
    alone = pool_of(model, 8).row()
    read(model, alone, [[*range(8)]])
    assert torch.equal(found, read(model, alone, [[8, 9]]))
    again.reset()
    for page in pages:
        pool.release(page)
    assert pool.free == 8


def test_a_pool_waits_for_native_code_before_it_gives_memory_back() -> None:
    cache = PagedCache(PAGE)
    cache.append(torch.ones(1, 1, PAGE, 2), torch.ones(1, 1, PAGE, 2))
    assert cache.pages is not None
    pool: PagePool = cache.pages.pool
    cache.reset()
    assert pool.begin_writing(1)
    thread = threading.Thread(target=pool.shrink)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert len(pool.references) > 0
    pool.end_writing()
    thread.join(10)
    assert not thread.is_alive()
    assert len(pool.references) == 0


def test_a_copy_of_a_pool_has_its_limit() -> None:
    cache = PagedCache(PAGE)
    cache.append(torch.ones(1, 1, PAGE, 2), torch.ones(1, 1, PAGE, 2))
    assert cache.pages is not None
    cache.pages.pool.limit = 1
    copy = pickle.loads(pickle.dumps(cache.pages.pool))
    assert not copy.begin_writing(1)
    with pytest.raises(CacheFullError, match="needs 1 more pages"):
        copy.reserve(1)


def test_layers_that_lie_elsewhere_have_no_pool() -> None:
    cache = ModelCache([DenseCache()])
    cache.layers[0].append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="got DenseCache"):
        SharedPool(cache)
