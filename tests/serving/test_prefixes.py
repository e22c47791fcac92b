"""The tree of kept prefixes: what can be given up is what giving up gives."""

from typing import Any, cast

from polyhead.caches.shared_pool import Page, SharedPool
from polyhead.serving.prefixes import Prefixes


class Pages:
    """Stands in for a pool: pages of two tokens, some of which requests use."""

    page_size = 2

    def __init__(self) -> None:
        self.kept: set[Page] = set()
        self.used: set[Page] = set()

    def keep(self, page: Page) -> None:
        self.kept.add(page)

    def release(self, page: Page) -> None:
        self.kept.remove(page)

    def is_idle(self, page: Page) -> bool:
        return page not in self.used


def test_a_page_is_no_room_while_a_request_uses_what_follows_on_it() -> None:
    pool: Any = Pages()
    prefixes = Prefixes(cast(SharedPool, pool))
    prefixes.add([1, 2, 3, 4], "", [(0,), (1,)])
    prefixes.add([1, 2, 5, 6], "", [(9,), (2,)])  # which computed its first page itself
    assert pool.kept == {(0,), (1,), (2,)}
    pool.used = {(9,), (2,)}
    assert prefixes.idle() == {(1,)}
    assert prefixes.evict(3) == 1
    assert pool.kept == {(0,), (2,)}
    pool.used = set()
    assert prefixes.idle() == {(0,), (2,)}
    assert prefixes.evict(3) == 2
    assert not pool.kept
