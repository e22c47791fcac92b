"""A token of every row of a cache that holds keys and values and an entry for each whole block.

Native code writes the keys and values and reads the entries (``layers/fused_layers.py``); what a
token completes is counted here. Only where that is nothing but writing, as in ``reserved.py``.

Shape letters: B batch, G kv heads, n blocks, D key size, W width of an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from polyhead.caches.layer_cache import LayerCache
from polyhead.caches.parts import PooledPart
from polyhead.caches.sizes import Dense, Plain
from polyhead.caches.stored import StoredCache
from polyhead.config import Pooled


class PooledStep(NamedTuple):
    """The parts of such a cache.

    Attributes:
        cache: The cache.
        kv: Its keys and values.
        part: Its entries.
        entries: ``[B, n, W]``, those that there is room for.
    """

    cache: LayerCache
    kv: StoredCache
    part: PooledPart
    entries: Tensor

    @classmethod
    def of(cls, cache: object) -> PooledStep | None:
        """Those of a cache with rows of equal length, all exact and in order; None: of no other."""
        if (
            type(cache) is not LayerCache
            or len(cache.__dict__) != _FIELDS
            or not any(cache._lengths)
        ):
            return None
        kv, part = cache._tokens.get("kv"), cache._parts.get("blocks")
        if kv is None or len(cache.memories) != 2 or not isinstance(part, PooledPart):
            return None
        contents, rows = kv._contents, part.rows
        if (
            rows is None
            or contents is None
            or contents.exact is None
            or contents.has_positions
            or type(contents.layout) is not Dense
            or type(contents.storage) is not Plain
            or kv._lengths != cache._lengths
            or len({*cache._lengths}) > 1
        ):
            return None
        if (cache._lengths[0] + 1) % part.memory.every == 0:
            rows.reserve(rows.stops[0] + 1)  # so that nothing fails once keys are written
        return cls(cache, kv, part, rows.tensors[0][:, 0])

    def count_token(self, entries_of: Callable[[Tensor], Tensor]) -> None:
        """Counts the token, whose keys and values are written.

        Args:
            entries_of: Makes ``[B, n, W]`` of keys ``[B, G, n, every, D]``.
        """
        before, every, contents = self.cache._lengths, self.part.memory.every, self.kv._contents
        after = before[0] + 1
        if after % every == 0 and contents is not None and contents.exact is not None:
            k = contents.exact.tensors[0][:, :, None, after - every : after]
            entries = entries_of(k).to(self.entries.dtype)
            self.part.write(entries, [1] * len(before), before)
        self.cache._lengths = [after] * len(before)


_FIELDS = len(vars(LayerCache((Pooled("blocks", 1, 1),))))
"""Attributes of such a cache: one more stands for a method that was replaced on it."""
