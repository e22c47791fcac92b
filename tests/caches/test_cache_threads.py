"""A cache is used by one thread at a time: a second one is refused, and no token is lost."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_model_cache import config
from test_state_machine import KINDS, tokens

import polyhead as ph
from polyhead.caches import DenseCache, ModelCache, StoredCache
from polyhead.caches.in_use import AllInUse
from polyhead.errors import SharedCacheError

K = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(0))


def in_thread(run: Callable[[], Any]) -> Any:
    """What ``run`` returns or raises in another thread."""
    found: list[Any] = []

    def caught() -> None:
        try:
            found.append(run())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_cache_that_another_thread_is_using_refuses_and_keeps_its_tokens(kind, tmp_path):
    layout, storage = KINDS[kind]
    cache = StoredCache(layout, storage)
    _, k, v = tokens(0, 2, 3, storage)
    cache.append(k, v)
    with cache.in_use:
        cache.append(k, v)  # the thread itself goes on
        for use in (
            lambda: cache.append(k, v),
            lambda: cache.rollback(1),
            lambda: cache.reorder([1, 0]),
            lambda: cache.fork(),
            lambda: cache.reset(),
            lambda: cache.save(tmp_path / "file"),
        ):
            assert isinstance(in_thread(use), SharedCacheError)
    assert cache.lengths == [6, 6]
    assert in_thread(lambda: cache.append(k, v)) is not None
    assert cache.lengths == [9, 9]  # threads may take turns


@torch.no_grad()
def test_threads_that_share_a_cache_lose_no_token_without_a_word():
    cache, kept, refused = DenseCache(), [], []

    def run() -> None:
        for _ in range(300):
            try:
                with torch.no_grad():
                    cache.append(K, K)
                kept.append(1)
            except SharedCacheError:
                refused.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.length == 3 * len(kept)
    assert len(kept) + len(refused) == 1200


@torch.no_grad()
def test_a_models_cache_is_one_threads_for_a_whole_run():
    model = ph.Transformer(config()).eval()
    cache = model.new_cache(64)
    ids = torch.arange(4)[None]
    found = []
    own = threading.current_thread()

    def interrupt(*call: object) -> None:
        if threading.current_thread() is own:
            found.append(in_thread(lambda: model(ids, cache=cache)))
            found.append(in_thread(lambda: cache.rollback(1)))

    with model.layers[1].register_forward_hook(interrupt):
        out = model(ids, cache=cache)
    assert [type(error) for error in found] == [SharedCacheError] * 2
    assert {layer.length for layer in cache.layers} == {4}
    assert torch.equal(out, model(ids, cache=model.new_cache(64)))
    with pytest.raises(SharedCacheError, match=r"in use by another thread.*fork\(\)"):
        raise found[0]


@torch.no_grad()
def test_copies_and_forks_of_a_cache_are_used_side_by_side():
    cache = ModelCache([DenseCache()])
    cache.layers[0].append(K, K)
    with cache.in_use, cache.layers[0].in_use:
        for other in (cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            in_thread(lambda other=other: other.layers[0].append(K, K))
            in_thread(lambda other=other: other.rollback(1))
            assert other.lengths == [5, 5]
    assert cache.lengths == [3, 3]


def test_what_several_caches_put_off_happens_when_they_are_left_or_one_is_refused():
    first, second, done = DenseCache(), DenseCache(), []
    with AllInUse([first, second]):
        first.in_use.afterwards(lambda: done.append("first"))
        assert not done
    assert done == ["first"]
    assert in_thread(lambda: first.append(K, K)) is not None  # it was let go
    with second.in_use:
        refused = in_thread(lambda: AllInUse([first, second]).__enter__())
    assert isinstance(refused, SharedCacheError)
    assert in_thread(lambda: first.append(K, K)) is not None
