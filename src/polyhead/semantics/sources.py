"""Where keys and values come from: a source hands a kernel its tiles with their positions.

Because keys carry positions, their order in memory is free: a ring buffer is not unrolled, a page
table not gathered. A cache's ``append`` returns a source; two plain tensors are a ``DenseSource``.

Shape letters: B batch, G kv heads, S keys, D key size, V value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyhead.native.coding import Coding
from polyhead.semantics.masks import Mask
from polyhead.semantics.tokens import Tokens

if TYPE_CHECKING:
    from polyhead.semantics.call import Specification

Observer = Callable[[Tensor, Tensor, "Specification", Tokens], None]
"""What is shown queries ``[B, H, T, D]``, their lse ``[B, H, T]``, the specification and places."""


class PageTable(NamedTuple):
    """Which pages hold a run of tokens, P in each; or of units of tokens, where those are coded.

    Attributes:
        pages: ``[B, m]`` int64: page i of a batch row holds its tokens i · P to (i + 1) · P.
        skipped: Tokens of the first page that come before the run.
        length: Tokens of the run.
    """

    pages: Tensor
    skipped: int
    length: int


class KVSegment(NamedTuple):
    """A run of keys and values where they lie.

    Attributes:
        tokens: Positions and places of the tokens.
        k: ``[B, G, n, D]``; in pages ``[pages, G, P, D]``, all that there are. With ``coding`` the
            codes of u units, uint8 ``[B, G, u, group · D · k_bits / 8]``, and P counts units.
        v: ``[B, G, n, V]``; in pages ``[pages, G, P, V]``; with ``coding`` likewise, and k itself
            where the value is part of the key.
        table: Which pages, or None.
        coding: What k and v stand for where they are codes, or None.
    """

    tokens: Tokens
    k: Tensor
    v: Tensor
    table: PageTable | None = None
    coding: Coding | None = None


class KeyValueSource(ABC):
    """Keys and values of S tokens, read a tile at a time.

    Attributes:
        batch: Batch size B.
        num_kv_heads: Number of kv heads G.
        key_dim: Key size D of a head.
        value_dim: Value size V of a head.
        tokens: The S keys: their positions and places.
        dtype: Dtype of the tensors that ``read`` returns.
        device: Device of keys and values.
        requires_grad: Whether a gradient may flow back to the tensors that ``gather`` returns.
        in_place: Whether ``segments`` tells where keys and values lie.
        mask: Hides the keys that are no tokens of a batch row, where rows differ in what they hold;
            ``attention`` adds it. Keys are then in no order of place, and queries need positions.
        of_row: The source of one batch row by itself, its keys in the order of place; None where
            they are in that order already.
        observer: What a layer shows the queries and their log-sum-exp after attention, so that it
            can recompute weights: a cache that evicts by them. None: nobody asks.
    """

    batch: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    tokens: Tokens
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    in_place: bool = False
    mask: Mask | None = None
    of_row: Callable[[int], KeyValueSource] | None = None
    observer: Observer | None = None

    @property
    def gather_bytes(self) -> int:
        """Bytes that ``gather`` copies; 0 where it returns views."""
        heads = self.batch * self.num_kv_heads * self.tokens.length
        return heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def tiles(self, size: int) -> list[Tokens]:
        """The keys in runs of at most ``size``, in the order that suits the storage.

        Together they hold every index of ``tokens`` once; a run's ``start`` is the index of its
        first key, whatever the order of the runs and wherever in memory the key lies.
        """
        return self.tokens.split(size)

    @abstractmethod
    def read(self, tile: Tokens) -> tuple[Tensor, Tensor]:
        """Keys ``[B, G, n, D]`` and values ``[B, G, n, V]`` of a run that ``tiles`` returned."""

    def segments(self) -> list[KVSegment]:
        """All keys and values where they lie, in the order of index, where that is ``in_place``."""
        raise NotImplementedError(f"{type(self).__name__} does not tell where its keys lie")

    def gather(self) -> tuple[Tensor, Tensor]:
        """All keys ``[B, G, S, D]`` and values ``[B, G, S, V]`` in the order of index; may copy."""
        tiles = sorted(self.tiles(max(1, self.tokens.length)), key=lambda tile: tile.start)
        pairs = [self.read(tile) for tile in tiles]
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


class DenseSource(KeyValueSource):
    """Two tensors in order. The value may be a slice of the key's own memory (absorbed MLA).

    Args:
        k: ``[B, G, S, D]``, any strides.
        v: ``[B, G, S, V]``, any strides.
        positions: ``[S]`` or ``[B, S]`` whole numbers; default 0 … S − 1.
        first_place: Place of the first key, where earlier ones have been forgotten.
    """

    in_place = True
    gather_bytes = 0

    def __init__(
        self, k: Tensor, v: Tensor, positions: Tensor | None = None, first_place: int = 0
    ) -> None:
        self.k, self.v = k, v
        self.batch, self.num_kv_heads, length, self.key_dim = k.shape
        self.value_dim = v.shape[-1]
        self.tokens = Tokens.of(length, shift=first_place, positions=positions)
        self.dtype, self.device = k.dtype, k.device
        self.requires_grad = k.requires_grad or v.requires_grad

    @classmethod
    def over(cls, k: Tensor, v: Tensor, tokens: Tokens) -> DenseSource:
        """Two tensors whose tokens are already known."""
        source = cls(k, v)
        source.tokens = tokens
        return source

    @classmethod
    def made_from(cls, source: KeyValueSource, k: Tensor, v: Tensor) -> DenseSource:
        """Other keys and values of the tokens of a source, in its order, with its mask and who
        observes it."""
        made = cls.over(k, v, source.tokens)
        made.mask, made.observer = source.mask, source.observer
        return made

    @classmethod
    def remade(
        cls,
        source: KeyValueSource,
        make: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> DenseSource:
        """What ``make`` makes of all keys and values of a source; of single rows likewise."""
        made = cls.made_from(source, *make(*source.gather()))
        if (of_row := source.of_row) is not None:
            made.of_row = lambda row: cls.remade(of_row(row), make)
        return made

    def read(self, tile: Tokens) -> tuple[Tensor, Tensor]:
        stop = tile.start + tile.length
        return self.k[:, :, tile.start : stop], self.v[:, :, tile.start : stop]

    def segments(self) -> list[KVSegment]:
        return [KVSegment(self.tokens, self.k, self.v)]

    def gather(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


def are_first_features(v: Tensor, k: Tensor) -> bool:
    """Whether values are the first features of the keys in the same memory, as a latent's are."""
    same_place = v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    return same_place and v.shape[:-1] == k.shape[:-1] and v.shape[-1] <= k.shape[-1]
