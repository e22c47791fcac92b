"""Prefixes of requests, kept as a tree of full pages for later requests that begin the same way.

A node is a page of tokens; its ancestors hold the tokens before them. A page stays when its last
request ends. To free pages, the least recently used leaves that no request uses are removed first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from polyhead.caches.shared_pool import Page, SharedPool


class _Node:
    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, key: object, parent: _Node | None, page: Page) -> None:
        self.key, self.parent, self.page, self.used = key, parent, page, 0
        self.children: dict[object, _Node] = {}


class Prefixes:
    """A tree of prefixes for each name; requests of different names share nothing.

    Args:
        pool: The pool that the pages belong to.
    """

    def __init__(self, pool: SharedPool) -> None:
        self._pool, self._time = pool, 0
        self._roots: dict[object, _Node] = {}

    def find(self, ids: Sequence[int], name: Hashable) -> list[Page]:
        """The pages of the longest prefix of ``ids`` that is kept under ``name``.

        They never hold the last token, which must be computed for its logits.
        """
        node, found = self._roots.get(name), []
        for key in self._keys(ids[:-1]):
            if node is None or (node := node.children.get(key)) is None:
                break
            self._use(node)
            found.append(node.page)
        return found

    def add(self, ids: Sequence[int], name: Hashable, pages: Sequence[Page]) -> None:
        """Keeps the full pages that hold ``ids`` under ``name``; pages already kept stay."""
        node = self._roots.setdefault(name, _Node(name, None, ()))
        for key, page in zip(self._keys(ids), pages, strict=False):
            if key not in node.children:
                self._pool.keep(page)
                node.children[key] = _Node(key, node, page)
            node = node.children[key]
            self._use(node)

    def idle(self) -> set[Page]:
        """The kept pages that ``evict`` can free: no request uses them, nor what follows on them.

        A request may use a page and not the one before, where it computed that one itself.
        """
        found: set[Page] = set()
        for node in reversed([*self._nodes()]):  # children first
            if self._pool.is_idle(node.page) and all(
                child.page in found for child in node.children.values()
            ):
                found.add(node.page)
        return found

    def evict(self, pages: int) -> int:
        """Frees kept pages that no request uses.

        Args:
            pages: Number of pages to free.

        Returns:
            Number of pages freed: fewer if requests use the rest.
        """
        wanted = pages
        while pages > 0:
            leaves = [
                node
                for node in self._nodes()
                if not node.children and self._pool.is_idle(node.page)
            ]
            if not leaves:
                break
            for node in sorted(leaves, key=lambda node: node.used)[:pages]:
                self._pool.release(node.page)
                assert node.parent is not None
                del node.parent.children[node.key]
                pages -= 1
                if not node.parent.children and node.parent.parent is None:
                    del self._roots[node.parent.key]
        return wanted - pages

    def _use(self, node: _Node) -> None:
        self._time += 1
        node.used = self._time

    def _keys(self, ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self._pool.page_size
        for first in range(0, len(ids) // size * size, size):
            yield tuple(ids[first : first + size])

    def _nodes(self) -> Iterator[_Node]:
        left = [child for root in self._roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            left += node.children.values()
            yield node
