"""Reserves cache slots that the native decode step fills in place.

Only where appending is nothing but writing: no memory is allocated but pages, nothing that a query
still sees leaves a ring, and groups of tokens that the new ones make old enough can be encoded
before those are there. All else is ``StoredCache.append``.

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
from polyhead.caches.views import positions_at
from polyhead.errors import UnsupportedError
from polyhead.native import batch_invariant
from polyhead.native.arguments import CacheSegment
from polyhead.native.coding import Coding
from polyhead.semantics.sources import DenseSource


class Reserved(NamedTuple):
    """What a cache holds with its new tokens, which are still to be written.

    Attributes:
        held: Where all that is seen lies, in order.
        before: The memory that counts the new tokens, as it was before.
    """

    held: list[CacheSegment]
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
    in_order = not isinstance(count, int) or batch_invariant.is_enabled()
    if not isinstance(count, int):
        if min(count) < max(count):
            return _reserve_elsewhere(contents, count, window, in_order=in_order)
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
            return Reserved([CacheSegment(tensors[0], v, 0, stop)], before)
    rows = contents.with_room(count, latents=True, wrap=True)
    if rows is None:
        counts = [count] * contents.shape.batch
        return _reserve_elsewhere(contents, counts, window, in_order=in_order)
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


def _in_rows(rows: Rows, first: int, stop: int) -> list[CacheSegment]:
    k, *more = rows.tensors
    v = more[0] if more else None
    if rows.store.limit is None:  # as ``spans`` has it
        return [CacheSegment(k, v, first, stop - first)]
    return [CacheSegment(k, v, span.address, span.length) for span in rows.spans(first, stop)]


def _reserve_elsewhere(
    contents: LayerKV, counts: Sequence[int], window: int | None, *, in_order: bool
) -> Reserved | None:
    """In pages, in rows that differ in length or in new tokens, or beside codes.

    Args:
        contents: As of ``reserve_slots``.
        counts: Tokens for each row.
        window: As of ``reserve_slots``.
        in_order: Whether a row's result is to have the bits that the row has alone.
    """
    if torch.is_grad_enabled() or contents.has_positions:
        return None
    if isinstance(contents.storage, Quantized):
        if in_order and not (contents.even and min(counts) == max(counts)):
            return None
        return _reserve_in_tails(contents, counts, contents.storage)
    memory = contents.main
    if isinstance(memory, Pages):
        before = Undo(memory, memory.stops, memory.firsts)
        if (found := memory.reserve_slots(counts)) is None:
            return None
        (k, *more), table = found
        v = more[0] if more else None
        return Reserved([CacheSegment(k, v, 0, max(memory.stops), table)], before)
    if not isinstance(memory, Rows):
        return None
    stop = max(length + count for length, count in zip(memory.stops, counts, strict=True))
    if isinstance(contents.layout, Ring):
        # Up to its window, a row lies as in a dense cache.
        if stop > min(memory.capacity, contents.layout.window):
            return _reserve_around(contents, memory, counts, window, in_order=in_order)
    elif type(contents.layout) is not Dense or stop > memory.capacity:
        return None
    before = Undo(memory, memory.stops, memory.firsts)
    memory.count(None, counts)
    k, *more = memory.tensors
    return Reserved([CacheSegment(k, more[0] if more else None, 0, stop)], before)


def _reserve_around(
    contents: LayerKV, ring: Rows, counts: Sequence[int], window: int | None, *, in_order: bool
) -> Reserved | None:
    """In a ring whose rows differ in what they hold."""
    if not isinstance(contents.layout, Ring) or max(counts) > 1 + contents.layout.spare:
        return None
    stop = max(length + count for length, count in zip(ring.stops, counts, strict=True))
    if stop > ring.capacity and ring.capacity != ring.store.limit:
        return None
    before = Undo(ring, ring.stops, ring.firsts)
    ring.count(None, counts)
    if in_order and any(ring.firsts):
        k, *more = ring.tensors
        v = more[0] if more else None
        return Reserved([CacheSegment(k, v, 0, ring.extent, firsts=ring.firsts)], before)
    return Reserved(_all_of(contents, window), before)


def _reserve_in_tails(
    contents: LayerKV, counts: Sequence[int], storage: Quantized
) -> Reserved | None:
    """Tokens that stay exact for now."""
    if not _only_writes(contents, counts, storage):
        return None
    tail = contents.memories["tail"]
    before = Undo(tail, tail.stops, tail.firsts)
    tail.count(None, counts)
    return Reserved(_all_of(contents), before)


def _only_writes(contents: LayerKV, counts: Sequence[int], storage: Quantized) -> bool:
    """Whether tokens go to the tails of all rows, once complete groups of theirs are encoded."""
    tail, sinks = contents.memories["tail"], contents.memories.get("sinks")
    stops = [n + count for n, count in zip(tail.stops, counts, strict=True)]
    if (
        (isinstance(contents.layout, Ring) and max(counts) > contents.layout.spare + 1)
        or (max(stops) > tail.capacity and tail.capacity != tail.store.limit)
        or (sinks is not None and min(sinks.stops) < storage.sink_tokens)
    ):
        return False
    most = storage.recent + storage.group
    if all(stop - contents.tail_first(row) < most for row, stop in enumerate(stops)):
        return True
    if (
        max(counts) > storage.recent
        or not isinstance(contents.memories["codes"], Rows)  # pages may have to wait for others
        or batch_invariant.is_enabled()  # which refuses to encode
    ):
        return False
    contents.encode_ahead(counts, storage)
    return True


def _all_of(contents: LayerKV, window: int | None = None) -> list[CacheSegment]:
    """Everything held, as modules read it: in the order of ``LayerKV.spans`` where rows hold the
    same places, else all addresses, with what each row has there."""
    held: list[CacheSegment] = []
    even = contents.even
    for name, memory in contents.memories.items():
        k, v, coding = _tensors_of(contents, name)
        table = memory.page_index() if coding and isinstance(memory, Pages) else None
        if even:
            first, stop = max(memory.firsts), memory.stops[0]
            if name == "tail":
                first = contents.tail_first(0)
            elif window is not None:
                first = max(first, stop - window)
            held += [
                CacheSegment(k, v, span.address, span.length, table, coding)
                for span in memory.spans(first, stop)
            ]
        elif memory.extent:
            where = positions_at(contents, name)
            held.append(CacheSegment(k, v, 0, memory.extent, table, coding, where))
    return held


def _tensors_of(contents: LayerKV, name: str) -> tuple[Tensor, Tensor | None, Coding | None]:
    if name == "codes":
        return contents.code_views()
    k, *more = contents.memories[name].tensors
    return k, more[0] if more else None, None
