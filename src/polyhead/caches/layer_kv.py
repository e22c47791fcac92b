"""The stores of one cache, filled together: which token goes where, and what can be taken back.

    plain, latent   tokens  all of them, in the layout
    quantized       sinks   the first tokens, exact
                    codes   groups of tokens in 8 or 4 bits, in the layout
                    tail    the last ``recent`` to ``recent + group − 1`` tokens, exact, in a ring

A group moves from the tail into the codes once, when it is complete and older than ``recent``, so
what a token looks like depends on the tokens of its group alone, not on how they were appended.

Shape letters: B batch, G kv heads, D key size, V value size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from polyhead.caches import sizes
from polyhead.caches.codecs import Codec, Codes, Exact, KVChunk
from polyhead.caches.memory import Memory, Rows
from polyhead.caches.pages import Pages
from polyhead.caches.sizes import Dense, Latent, Layout, Plain, Quantized, Ring, Storage
from polyhead.caches.source import COPIED_TOKENS, StoredSegment
from polyhead.native.coding import Coding


class Shape(NamedTuple):
    """What the first append determines."""

    batch: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def stores(
        self, layout: Layout, storage: Storage, *, positions: bool = False
    ) -> tuple[sizes.Store, ...]:
        """The parts of a cache of this shape; raises ConfigError if there cannot be one."""
        return sizes.stores(
            layout,
            storage,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            positions=positions,
        )


def latent_of(storage: Storage) -> Latent | None:
    if isinstance(storage, Quantized):
        return storage.latent
    return storage if isinstance(storage, Latent) else None


class LayerKV:
    """Memory for tokens of one shape.

    Args:
        layout: Where tokens lie.
        storage: How they are encoded.
        shape: Shape of one token of all rows.
        reserved: Tokens per row to make room for.

    Attributes:
        memories: By the name of the store.
        codecs: Likewise.
        exact: The memory, if it holds exact tokens in order.
    """

    def __init__(self, layout: Layout, storage: Storage, shape: Shape, reserved: int) -> None:
        self.layout, self.storage, self.shape = layout, storage, shape
        self._views: tuple[list[Tensor], tuple[Tensor, Tensor, Coding]] | None = None
        needed = sizes.units(storage, reserved)
        self.memories: dict[str, Memory] = {}
        for store in shape.stores(layout, storage):
            kind = Rows if store.page is None else Pages
            self.memories[store.name] = kind(store, shape.batch, shape.device)
            self.memories[store.name].reserve(needed[store.name])
        exact = Exact(None if latent_of(storage) is None else shape.value_dim)
        self.codecs: dict[str, Codec] = dict.fromkeys(self.memories, exact)
        # The store in the layout: the one whose units a ring drops.
        self.main = self.memories.get("tokens") or self.memories["codes"]
        self.exact = self._exact()
        if isinstance(storage, Quantized):
            self.codecs["codes"] = Codes(storage, shape.key_dim, shape.value_dim, shape.dtype)

    def _exact(self) -> Rows | None:
        """The memory, if it holds exact tokens in order."""
        exact = type(self.layout) is Dense and type(self.storage) in (Plain, Latent)
        return self.main if exact and isinstance(self.main, Rows) else None

    def fits(self, k: Tensor, v: Tensor) -> bool:
        """Whether keys and values are of this shape."""
        B, G, D, V, dtype, device = self.shape
        T = k.shape[2:3]
        return (
            k.shape == (B, G, *T, D)
            and v.shape == (B, G, *T, V)
            and k.dtype is dtype is v.dtype
            and k.device == device == v.device
        )

    @property
    def even(self) -> bool:
        """Whether all rows hold the same places in every store."""
        places = [self.main.firsts, *(memory.stops for memory in self.memories.values())]
        return all(rows.count(rows[0]) == len(rows) for rows in places)

    def with_room(self, count: int, *, latents: bool = False, wrap: bool = False) -> Rows | None:
        """The memory, if exact tokens go to the end of rows of equal length with room.

        A ring has it while a token at a time takes the place of one that is out of the window.

        Args:
            count: Tokens for each row.
            latents: Whether latents, which have no values of their own, are exact tokens too.
            wrap: Whether several tokens may go around the end of a ring, in two runs.
        """
        rows, kind = self.main, type(self.storage)
        if (
            not isinstance(rows, Rows)
            or type(self.layout) not in (Dense, Ring)
            or not (kind is Plain or (latents and kind is Latent))
            or torch.is_grad_enabled()
            or len(rows.tensors) != (2 if kind is Plain else 1)  # no positions
            or (len(rows.stops) > 1 and not self.even)
        ):
            return None
        if rows.stops[0] + count <= rows.capacity:
            return rows
        most = 1 + self.layout.spare if wrap and isinstance(self.layout, Ring) else 1
        return rows if count <= most and rows.capacity == rows.store.limit else None

    def code_views(self) -> tuple[Tensor, Tensor, Coding]:
        """Codes of keys and values, and what they stand for: all that there is room for."""
        codes, codec = self.memories["codes"], self.codecs["codes"]
        tensors = codes.as_views() if isinstance(codes, Pages) else codes.tensors
        known = self._views
        if known is None or any(a is not b for a, b in zip(known[0], tensors, strict=True)):
            k, v, coding = codec.as_views(tensors)
            if coding is None:
                raise TypeError("these tokens are exact: they are not coded")
            self._views = known = [*tensors], (k, v, coding)
        return known[1]

    @property
    def has_positions(self) -> bool:
        """Whether the tensors of any store hold positions."""
        return any(memory.store.fields[-1].name == "positions" for memory in self.memories.values())

    def add_positions(self) -> None:
        """Stores positions from now on, and those of the tokens held: their places."""
        for store in self.shape.stores(self.layout, self.storage, positions=True):
            memory = self.memories[store.name]
            if memory.store != store:
                memory.add_positions(store, self.base(store.name))

    def base(self, name: str) -> int:
        """Place of the first token that a store can hold."""
        after_sinks = isinstance(self.storage, Quantized) and name != "sinks"
        return (
            self.storage.sink_tokens if after_sinks and isinstance(self.storage, Quantized) else 0
        )

    def states(self) -> list[tuple[int, ...]]:
        """Rows with equal states hold the same places and can be written together."""
        stops = [memory.stops for memory in self.memories.values()]
        return list(zip(*stops, self.main.firsts, strict=True))

    def write(self, rows: list[int] | None, stream: KVChunk, length: int) -> None:
        """Appends to rows that have ``length`` tokens each; None: all rows."""
        if not isinstance(self.storage, Quantized):
            self.memories["tokens"].write(rows, self.codecs["tokens"].encode(stream))
            return
        count = stream.k.shape[2]
        first = min(count, max(0, self.storage.sink_tokens - length))
        if first:
            sinks = stream.part(0, first)
            self.memories["sinks"].write(rows, self.codecs["sinks"].encode(sinks))
            stream = stream.part(first, count)
        self._encode_groups(rows, stream, self.storage)
        self.memories["tail"].write(rows, self.codecs["tail"].encode(stream))

    def encode_ahead(self, counts: Sequence[int], storage: Quantized) -> None:
        """Encodes what so many more tokens of each row, at most ``recent``, make old enough.

        An append of these tokens then only writes, and leaves what it would have left anyway.
        """
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for row, state in enumerate(zip(self.states(), counts, strict=True)):
            alike.setdefault(state, []).append(row)
        for (_, count), same in alike.items():
            rows = None if len(alike) == 1 else same
            none = self.memories["tail"].read(0, 0)
            k, *v = none if rows is None else [x[rows] for x in none]
            self._encode_groups(rows, KVChunk(k, v[0] if v else None), storage, count)

    def _encode_groups(
        self, rows: list[int] | None, stream: KVChunk, storage: Quantized, coming: int = 0
    ) -> None:
        """Moves the groups that are now complete and old enough into the codes."""
        tail, codes, group = self.memories["tail"], self.memories["codes"], storage.group
        row = 0 if rows is None else rows[0]
        held, before = codes.stops[row] * group, tail.stops[row]
        groups = max(0, before + stream.k.shape[2] + coming - held - storage.recent) // group
        if not groups:
            return
        waiting = [
            [
                x if rows is None else x[rows]
                for x in tail.read(span.address, span.address + span.length)
            ]
            for span in tail.spans(held, before)
        ]
        if waiting:
            pieces = zip(*waiting, stream.tensors(), strict=True)
            stream = stream.of([torch.cat(parts, dim=2) for parts in pieces])
        self._views = None  # views would keep the old tensors
        codes.reserve(codes.stops[row] + groups)
        # A few groups at a time: encoding works in float32.
        step = max(1, COPIED_TOKENS // group) * group
        for start in range(0, groups * group, step):
            part = stream.part(start, min(start + step, groups * group))
            codes.write(rows, self.codecs["codes"].encode(part))

    def cut(self, row: int, length: int) -> None:
        """Takes back the tokens of a row beyond ``length``, as far as ``max_rollback`` allows."""
        if not isinstance(self.storage, Quantized):
            self.memories["tokens"].cut(row, length)
            return
        rest = max(0, length - self.storage.sink_tokens)
        self.memories["tail"].cut(row, rest)
        if rest < self.memories["codes"].stops[row] * self.storage.group:
            self.memories["codes"].cut(row, 0)
        if "sinks" in self.memories:
            self.memories["sinks"].cut(row, min(length, self.storage.sink_tokens))

    def max_rollback(self, row: int, length: int) -> int:
        """Tokens that a row of ``length`` tokens can take back without taking back all."""
        most = length
        if isinstance(self.storage, Quantized) and self.main.stops[row]:
            most = length - self.storage.sink_tokens - self.main.stops[row] * self.storage.group
        first = self.main.firsts[row] * self.main.store.tokens
        if isinstance(self.layout, Ring) and first:
            most = min(most, length - self.layout.window + 1 - first)
        return max(0, most)

    def spans(self) -> list[StoredSegment]:
        """Everything held in the order of place, where rows are even."""
        found = []
        for name, memory in self.memories.items():
            codec = self.codecs[name]
            first = self.tail_first(0) if name == "tail" else max(memory.firsts)
            found += [
                StoredSegment(memory, codec, span.address, span.length * codec.tokens)
                for span in memory.spans(first, memory.stops[0])
            ]
        return found

    def addresses(self) -> list[tuple[str, StoredSegment]]:
        """All addresses in use by any row, by store."""
        return [
            (name, StoredSegment(memory, self.codecs[name], 0, memory.extent * memory.store.tokens))
            for name, memory in self.memories.items()
            if memory.extent
        ]

    def tail_first(self, row: int) -> int:
        """The oldest unit of the tail that is not in the codes."""
        codes = self.memories["codes"]
        return codes.stops[row] * codes.store.tokens

    def fork(self) -> Self:
        other = copy.copy(self)
        other._views = None
        other.memories = {name: memory.fork() for name, memory in self.memories.items()}
        other.main = other.memories.get("tokens") or other.memories["codes"]
        other.exact = other._exact()
        return other

    def of_row(self, row: int) -> Self:
        """The part of one batch row, with the same memory; not for pages."""
        other = copy.copy(self)
        other._views = None
        memories = self.memories.items()
        other.memories = {name: m.of_row(row) for name, m in memories if isinstance(m, Rows)}
        other.main = other.memories.get("tokens") or other.memories["codes"]
        other.exact = other._exact()
        other.shape = self.shape._replace(batch=1)
        return other

    @property
    def paged(self) -> Pages | None:
        """The pages, where they hold everything."""
        pages = self.memories.get("tokens")
        return pages if isinstance(pages, Pages) else None

    def ragged_pages(self) -> Pages | None:
        """The pages, where exact tokens of rows of different lengths go to their ends, on a CPU."""
        pages = self.paged
        if (
            pages is None
            or type(self.storage) is not Plain
            or torch.is_grad_enabled()
            or self.has_positions
            or self.shape.device.type != "cpu"
            or self.even
        ):
            return None
        return pages

    def extend(self, table: Sequence[Sequence[int]], stops: Sequence[int]) -> None:
        """Adds rows that begin with pages of its pool; where it is ``paged``."""
        if (pages := self.paged) is not None:
            pages.append_rows(table, stops)
            self.shape = self.shape._replace(batch=len(pages.stops))

    def reorder(self, rows: list[int]) -> None:
        self._views = None
        for memory in self.memories.values():
            memory.reorder(rows)
        self.shape = self.shape._replace(batch=len(rows))
