"""Reserves cache slots that the native decode step fills in place.

Only where appending is nothing but writing: no memory is allocated but pages, no group of tokens is
quantized, nothing that a query still sees leaves a ring. All else is ``StoredCache.append``.

Shape letters: B batch, G kv heads, D key size, V value size, P units in a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.caches.layer_kv import LayerKV
from polyhead.caches.memory import Memory, Rows
from polyhead.caches.pages import Pages
from polyhead.caches.sizes import Dense, Plain, Quantized, Ring
from polyhead.errors import UnsupportedError
from polyhead.native.coding import Coding
from polyhead.semantics.sources import DenseSource

KVSegment = tuple[Tensor, Tensor | None, int, int, Tensor | None, Coding | None]
"""The fields of ``native.arguments.KVSegment``."""


class Reserved(NamedTuple):
    """What a cache holds with its new tokens, which are still to be written.

    Attributes:
        held: Where all that is seen lies, in order.
        before: The memory that counts the new tokens, as it was before.
    """

    held: list[KVSegment]
    before: Undo


class Undo(NamedTuple):
    """A memory with its stops and firsts before it counted new tokens; none of its tensors."""

    memory: Memory
    stops: list[int]
    firsts: list[int]

    def restore(self) -> None:
        """Releases the reserved slots, which have not been written."""
        memory, stops, firsts = self
        if isinstance(memory, Pages):  # which gives pages back
            for row, stop in enumerate(stops):
                memory.cut(row, stop)
        memory.stops, memory.firsts = stops, firsts


def reserve_slots(
    contents: LayerKV, count: int | Sequence[int], window: int | None = None
) -> Reserved | None:
    """Counts ``count`` more tokens in every row.

    Args:
        contents: What the cache holds; its rows may differ in length.
        count: Number of tokens to reserve in every row, or in each.
        window: Tokens that the new one sees, itself included, where ``held`` is to begin with them.

    Returns:
        None, and nothing is counted, unless ``append`` would only write.
    """
    if not isinstance(count, int):
        if min(count) < max(count):
            return _reserve_elsewhere(contents, count)
        count = count[0]
    rows = contents.exact
    if (
        rows is not None and window is None and not torch.is_grad_enabled()
    ):  # what decoding does for every token and layer
        tensors, stops = rows.tensors, rows.stops
        stop = stops[0] + count
        values = 1 if type(contents.storage) is Plain else 0
        if (
            len(tensors) == 1 + values  # no positions
            and (len(stops) == 1 or stops.count(stops[0]) == len(stops))
            and stop <= tensors[0].shape[2]
            and stop <= tensors[values].shape[2]
            and not rows.firsts[0]
        ):
            before = Undo(rows, stops, rows.firsts)
            rows.stops = [stop] * len(stops)
            v = tensors[1] if values else None
            return Reserved([(tensors[0], v, 0, stop, None, None)], before)
    rows = contents.with_room(count, latents=True, wrap=True)
    if rows is None:
        return _reserve_elsewhere(contents, [count] * contents.shape.batch)
    before = Undo(rows, rows.stops, rows.firsts)
    rows.count(None, count)
    stop = rows.stops[0]
    first = rows.firsts[0] if window is None else max(stop - window, rows.firsts[0])
    return Reserved(_in_rows(rows, first, stop), before)


def write_at(positions: Tensor, contents: LayerKV | None, k: Tensor, v: Tensor) -> DenseSource:
    """Writes tokens in slots that ``reserve_slots`` has counted, given by a tensor on the device.

    Args:
        positions: ``[T]`` places that are allocated.
        contents: What the cache holds.
        k: ``[B, G, T, D]``.
        v: ``[B, G, T, V]``.

    Returns:
        All that there is room for, the same tensors in every step; a causal mask hides the rest.

    Raises:
        UnsupportedError: Not exact tokens in order of place.
    """
    rows = None if contents is None else contents.with_room(0, latents=True)
    if contents is None or rows is None or type(contents.layout) is not Dense:
        raise UnsupportedError("a repeated step needs a dense cache of exact tokens, not empty")
    if positions.ndim != 1:
        raise UnsupportedError("a repeated step needs rows of equal length")
    for tensor, record in zip(rows.tensors, (k, v), strict=False):
        tensor.index_copy_(2, positions, record)
    keys, *values = rows.tensors
    return DenseSource(keys, values[0] if values else keys[..., : contents.shape.value_dim])


def _in_rows(rows: Rows, first: int, stop: int) -> list[KVSegment]:
    k, *more = rows.tensors
    v = more[0] if more else None
    if rows.store.limit is None:  # as ``spans`` has it
        return [(k, v, first, stop - first, None, None)]
    return [(k, v, span.address, span.length, None, None) for span in rows.spans(first, stop)]


def _reserve_elsewhere(contents: LayerKV, counts: Sequence[int]) -> Reserved | None:
    """In pages, in rows that differ in length or in new tokens, or beside codes."""
    if torch.is_grad_enabled() or contents.has_positions:
        return None
    if isinstance(contents.storage, Quantized):
        if not contents.even or min(counts) < max(counts):
            return None
        return _reserve_in_tail(contents, counts[0], contents.storage)
    memory = contents.main
    before = Undo(memory, memory.stops, memory.firsts)
    if isinstance(memory, Pages):
        if (found := memory.reserve_slots(counts)) is None:
            return None
        (k, *more), table = found
        v = more[0] if more else None
        return Reserved([(k, v, 0, max(memory.stops), table, None)], before)
    stop = max(length + count for length, count in zip(memory.stops, counts, strict=True))
    layout, room = contents.layout, memory.capacity
    if isinstance(layout, Ring):  # up to its window, a row lies as in a dense cache
        room = min(room, layout.window)
    elif type(layout) is not Dense:
        return None
    if stop > room:
        return None
    memory.count(None, counts)
    k, *more = memory.tensors
    return Reserved([(k, more[0] if more else None, 0, stop, None, None)], before)


def _reserve_in_tail(contents: LayerKV, count: int, storage: Quantized) -> Reserved | None:
    """Tokens that stay exact for now, in the order of ``LayerKV.spans``."""
    tail, codes = contents.memories["tail"], contents.memories["codes"]
    sinks = contents.memories.get("sinks")
    first, stop = contents.tail_first(0), tail.stops[0] + count
    if (
        not isinstance(tail, Rows)
        or (isinstance(contents.layout, Ring) and count > contents.layout.spare + 1)
        or stop - first - storage.recent >= storage.group
        or (stop > tail.capacity and tail.capacity != tail.store.limit)
        or (sinks is not None and sinks.stops[0] < storage.sink_tokens)
    ):
        return None
    held: list[KVSegment] = []
    if isinstance(sinks, Rows):
        held += _in_rows(sinks, 0, storage.sink_tokens)
    k, v, coding = contents.code_views()
    table = codes.page_index() if isinstance(codes, Pages) else None
    for span in codes.spans(max(codes.firsts), codes.stops[0]):
        held.append((k, v, span.address, span.length, table, coding))
    before = Undo(tail, tail.stops, tail.firsts)
    tail.count(None, count)
    return Reserved([*held, *_in_rows(tail, first, stop)], before)
