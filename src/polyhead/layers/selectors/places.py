"""Where the tokens of a call stand in their sequences: what blocks are counted by.

In a cache whose rows differ, or behind padding, the key at an index is not the key at that place.

Shape letters: B batch, T queries, S keys, m blocks of a choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.semantics import Chosen, DenseSource, KeyValueSource


class Places(NamedTuple):
    """Places of a call's queries and keys.

    Attributes:
        before: Tokens that each row had.
        after: Tokens that each row has.
        queries: ``[T]`` or ``[B, T]`` places, -1 for padding.
        keys: ``[B, S]`` index of the key at each place; None: the place itself.
    """

    before: list[int]
    after: list[int]
    queries: Tensor
    keys: Tensor | None

    @classmethod
    def of(
        cls,
        x: Tensor,
        source: KeyValueSource,
        positions: Tensor | None,
        before: list[int] | None = None,
    ) -> Places:
        """Those of a call.

        Args:
            x: ``[B, T, E]``, its tokens.
            source: The keys, those of the call among them.
            positions: ``[T]`` or ``[B, T]`` as the layer was given them, below 0 for padding.
            before: Tokens that a cache had of each row; None: there is no cache.
        """
        B, T = x.shape[:2]
        cached, before = before is not None, [0] * B if before is None else before
        real = None
        if positions is not None and positions.ndim == 2:
            real = (positions >= 0).expand(B, T).to(x.device)
        if real is None or bool(real.all()):
            counts = [T] * B
            steps = torch.arange(T, device=x.device)
        else:
            counts = real.sum(dim=1).tolist()
            steps = real.cumsum(dim=1) - 1
        after = [n + count for n, count in zip(before, counts, strict=True)]
        if len({*before}) == 1:
            queries = steps + before[0]
        else:
            queries = steps + torch.tensor(before, device=x.device)[:, None]
        if real is not None and min(counts) < T:
            queries = queries.masked_fill(~real, -1)
            if not cached:
                return cls(before, after, queries, (~real).byte().argsort(dim=1, stable=True))
        if not cached or (len({*after}) == 1 and source.mask is None):
            return cls(before, after, queries, None)
        return cls(before, after, queries, _order(source))

    @property
    def even(self) -> bool:
        """Whether all rows stand at the same token before and after, and lie in order."""
        return self.keys is None and len({*self.before}) == 1 and len({*self.after}) == 1

    def seen(self, blocks: Tensor, size: int, group: int) -> Chosen:
        """The keys of chosen blocks.

        Args:
            blocks: ``[B, n, T, m]``, below 0 for none.
            size: Keys of a block.
            group: Query heads that share a choice.
        """
        if self.keys is None:
            return Chosen(blocks, size, group)
        places = blocks[..., None] * size + torch.arange(size, device=blocks.device)
        places = places.flatten(-2)  # [B, n, T, m · size]
        held = torch.tensor(self.after, device=blocks.device)[:, None, None, None]
        real = (places >= 0) & (places < held)
        index = self.keys.to(blocks.device)[:, None, None].expand(*places.shape[:3], -1)
        return Chosen(index.gather(-1, places.clamp(0, index.shape[-1] - 1)).where(real, -1), 1,
                      group)  # fmt: skip


def _order(source: KeyValueSource) -> Tensor | None:
    """``[B, S]`` index of the key at each place; None where they agree."""
    positions = source.tokens.position_tensor(source.device)
    positions = positions.expand(source.batch, -1)
    places = torch.arange(positions.shape[1], device=positions.device)
    # Empty slots stand behind all positions, and so last.
    order = positions.argsort(dim=1, stable=True)
    return None if bool((order == places).all()) else order


def whole_blocks(
    source: KeyValueSource, places: Places, size: int
) -> tuple[Tensor, Tensor]:  # [B, G, n, size, D] and [B, G, n, size, V]
    """Keys and values of the blocks that the new tokens complete.

    Returns:
        ``[B, G, n, size, D]`` and ``[B, G, n, size, V]``, n of the row with most; a row with fewer
        has others behind its own.
    """
    first = [n // size for n in places.before]
    counts = [n // size - start for n, start in zip(places.after, first, strict=True)]
    n, (B, G) = max(counts), (source.batch, source.num_kv_heads)
    if not n:
        return tuple(  # type: ignore[return-value]
            torch.empty(B, G, 0, size, width, dtype=source.dtype, device=source.device)
            for width in (source.key_dim, source.value_dim)
        )
    if places.even:
        k, v = read_range(source, first[0] * size, (first[0] + n) * size)
        return k.reshape(B, G, n, size, -1), v.reshape(B, G, n, size, -1)
    k, v = source.gather()
    inside = torch.arange(n * size, device=k.device)
    index = torch.tensor(first, device=k.device)[:, None] * size + inside
    index = index.clamp(max=k.shape[2] - 1)
    if places.keys is not None:
        index = places.keys.to(k.device).gather(1, index)
    k, v = (
        x.gather(2, index[:, None, :, None].expand(B, G, -1, x.shape[-1])).reshape(
            B, G, n, size, -1
        )
        for x in (k, v)
    )
    return k, v


def pooled_blocks(tail: Tensor, places: Places, size: int, stride: int) -> Tensor:
    """``[B, n, size, W]`` what the entries that new tokens complete are made of.

    Args:
        tail: ``[B, size − 1 + T, W]``, the new tokens of each row behind the last ones before them.
        places: Where the tokens stand.
        size: Tokens that an entry is made of, up to its last.
        stride: Tokens from one entry to the next.

    Returns:
        n of the row with most; a row with fewer has others behind its own.
    """
    before = torch.tensor(places.before, device=tail.device)
    pairs = zip(places.before, places.after, strict=True)
    n = max(after // stride - had // stride for had, after in pairs)
    first = before % stride  # tokens of the stride that has begun
    ends = (torch.arange(1, n + 1, device=tail.device) * stride)[None] - first[:, None]
    index = (ends[..., None] - 1 + torch.arange(size, device=tail.device)).flatten(1)
    index = index.clamp(max=tail.shape[1] - 1)[..., None].expand(-1, -1, tail.shape[-1])
    return tail.gather(1, index).view(len(tail), n, size, tail.shape[-1])


def source_of(entries: Tensor, size: int) -> DenseSource:
    """Entries of blocks ``[B, N, D]`` as keys and values at the place of their last token."""
    keys = entries[:, None]
    ends = torch.arange(1, entries.shape[1] + 1, device=entries.device) * size - 1
    return DenseSource(keys, keys, ends)


def read_range(source: KeyValueSource, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """``[B, G, n, D]`` and ``[B, G, n, V]``: the keys and values at some indexes."""
    pairs = []
    for tile in sorted(source.tiles(max(1024, stop - start)), key=lambda tile: tile.start):
        low, high = max(start, tile.start), min(stop, tile.start + tile.length)
        if low < high:
            part = slice(low - tile.start, high - tile.start)
            k, v = source.read(tile)
            pairs.append((k[:, :, part], v[:, :, part]))
    if len(pairs) == 1:
        return pairs[0]
    keys, values = zip(*pairs, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)
