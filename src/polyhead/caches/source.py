"""What a cache hands to a kernel: runs of addresses, read a tile at a time where they lie.

Keys carry positions, so their order is free. While all batch rows stand at the same token the runs
come in the order of place and positions are counted, not stored. If rows differ in length, an
address holds different places in different rows; then the position of every key is stored, and an
address without a token has position ``NO_POSITION``, later than any query.

Shape letters: B batch, G kv heads, S keys, n keys of a tile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from polyhead.caches.codecs import Codec, KVChunk
from polyhead.caches.memory import Memory
from polyhead.caches.pages import Pages
from polyhead.semantics.masks import Mask, Range, Visibility
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs
from polyhead.semantics.sources import KeyValueSource, KVSegment
from polyhead.semantics.tokens import Tokens

NO_POSITION = 1 << 40
"""Position of empty slots: larger than any query position, so ``Causal`` hides them."""

COPIED_TOKENS = 1024
"""Most tokens that are decoded, or collected from pages, at a time."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredSegment:
    """A run of tokens that lie in a memory, from the first token of unit ``address`` on."""

    memory: Memory
    codec: Codec
    address: int
    length: int

    @property
    def in_place(self) -> bool:
        return self.memory.in_place and self.codec.tokens == 1

    @property
    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.memory.tensors)

    def tile_size(self, size: int) -> int:
        """At most ``size`` tokens; whole pages and units where those fit."""
        if self.in_place:
            return size
        size = min(size, COPIED_TOKENS)
        whole = self.codec.tokens * (self.memory.store.page or 1)
        return size // whole * whole or size

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens = self.codec.tokens
        first = start // tokens
        records = self.memory.read(self.address + first, self.address + -(-stop // tokens))
        k, v = self.codec.decode(records)
        if tokens == 1:
            return k, v
        part = slice(start - first * tokens, stop - first * tokens)
        return k[:, :, part], v[:, :, part]

    def segment(self, tokens: Tokens) -> KVSegment:
        """Addresses of everything; ``read`` would copy pages and decode codes."""
        stop = self.address + self.length // self.codec.tokens
        if isinstance(self.memory, Pages):
            k, v, coding = self.codec.as_views([x.transpose(0, 1) for x in self.memory.tensors])
            return KVSegment(tokens, k, v, self.memory.pages(self.address, stop), coding)
        k, v, coding = self.codec.as_views(self.memory.read(self.address, stop))
        return KVSegment(tokens, k, v, None, coding)

    def positions(self) -> Tensor:
        """``[B, length]`` positions, where they are stored."""
        stop = self.address + self.length // self.codec.tokens
        return self.codec.positions(self.memory.read(self.address, stop, only=-1))


@dataclass(frozen=True, eq=False, slots=True)
class InMemorySegment:
    """A run of tokens that lie in the tensors that the cache was given."""

    stream: KVChunk
    value_dim: int

    in_place = True

    @property
    def length(self) -> int:
        return self.stream.k.shape[2]

    @property
    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.stream.tensors())

    def tile_size(self, size: int) -> int:
        return size

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v, _ = self.stream.part(start, stop)
        if k.stride(-1) != 1:
            # Kernels may rely on the rows of a cache being dense.
            k, v = k.contiguous(), v if v is None else v.contiguous()
        return k, k[..., : self.value_dim] if v is None else v

    def segment(self, tokens: Tokens) -> KVSegment:
        return KVSegment(tokens, *self.read(0, self.length))


class SlotMask(Mask, arguments={}):
    """Hides the addresses that hold no token of a batch row."""

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        k, nowhere = of.k_position, of.number(NO_POSITION)
        return lambda pair: k(pair) < nowhere(pair)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if k.span is None:
            return Visibility.SOME
        if k.span.high < NO_POSITION:
            return Visibility.ALL
        return Visibility.NONE if k.span.low >= NO_POSITION else Visibility.SOME

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        return Range(None, torch.full((1, q.length), NO_POSITION, device=device))

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return self

    def __repr__(self) -> str:
        return "SlotMask()"


class SizesOf(Protocol):
    """What the source of a cache tells kernels about its keys and values."""

    @property
    def batch(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class StoredSource(KeyValueSource):
    """Everything a cache holds; valid until the cache changes.

    Args:
        spans: In the order of index.
        shape: Batch, heads, sizes, dtype and device.
        shift: Place of the first token, where tokens are in the order of place.
        positions: ``[B, S]``, or None: positions are places.
        gaps: Whether rows differ in what they hold: then some keys stand at ``NO_POSITION``, the
            order of keys is not that of place, and queries need positions.
        of_row: The source of one batch row by itself, its keys in the order of place, where that of
            index may be another one.

    Attributes:
        mask: With gaps, what hides them from any query. ``Causal()`` does so by itself.
        gather_bytes: Bytes that ``gather`` copies; 0 where it returns views.
    """

    in_place = True

    def __init__(
        self,
        spans: list[StoredSegment | InMemorySegment],
        shape: SizesOf,
        *,
        shift: int = 0,
        positions: Tensor | None = None,
        gaps: bool = False,
        of_row: Callable[[int], KeyValueSource] | None = None,
    ) -> None:
        self.of_row = of_row
        self.spans = [span for span in spans if span.length]
        self.batch, self.num_kv_heads = shape.batch, shape.num_kv_heads
        self.key_dim, self.value_dim = shape.key_dim, shape.value_dim
        self.dtype, self.device = shape.dtype, shape.device
        self._starts = [0, *accumulate(span.length for span in self.spans)]
        self.tokens = Tokens.of(self._starts[-1], shift=shift, positions=positions)
        self.gaps = gaps
        self.mask = SlotMask() if gaps else None
        self.requires_grad = any(span.requires_grad for span in self.spans)

    @property
    def gather_bytes(self) -> int:
        if len(self.spans) == 1 and self.spans[0].in_place:
            return 0
        return super().gather_bytes

    def tiles(self, size: int) -> list[Tokens]:
        if len(self.spans) == 1 and self.spans[0].in_place:
            return self.tokens.split(size)
        return [
            tile
            for span, start in zip(self.spans, self._starts, strict=False)
            for tile in self.tokens.slice(start, start + span.length).split(span.tile_size(size))
        ]

    def read(self, tile: Tokens) -> tuple[Tensor, Tensor]:
        i = bisect_right(self._starts, tile.start) - 1
        start = tile.start - self._starts[i]
        return self.spans[i].read(start, start + tile.length)

    def segments(self) -> list[KVSegment]:
        return [
            span.segment(self.tokens.slice(start, start + span.length))
            for span, start in zip(self.spans, self._starts, strict=False)
        ]

    def gather(self) -> tuple[Tensor, Tensor]:
        pairs = [span.read(0, span.length) for span in self.spans]
        if len(pairs) == 1:
            return pairs[0]
        if not pairs:
            empty = torch.empty(
                (self.batch, self.num_kv_heads, 0, self.key_dim + self.value_dim),
                dtype=self.dtype,
                device=self.device,
            )
            return empty[..., : self.key_dim], empty[..., self.key_dim :]
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)
