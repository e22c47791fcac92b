"""flash_attn's key/value cache: tensors of the caller, written in place, dense or paged.

Shape letters: B batch, n new tokens, S slots, G kv heads, D head size, R rotated features.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """A view of the caller's tensors that knows which slots belong to which row.

    Args:
        k: ``[rows, slots, G, D]``, or ``[pages, page size, G, D]`` with ``block_table``.
        lengths: Tokens in each row so far, one number or ``[B]``; None: the cache is full.
        rows: ``[B]`` row of the cache for each row of the batch, or None.
        block_table: ``[B, pages per sequence]`` or None.

    Attributes:
        lengths: ``[B]`` tokens in each row.

    Raises:
        ValueError: Shapes or lengths that do not fit.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        lengths: int | Tensor | None,
        batch: int,
        rows: Tensor | None,
        block_table: Tensor | None,
    ) -> None:
        if k.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                "k_cache and v_cache must be 4-D and share all but the head size: got "
                f"{list(k.shape)} and {list(v.shape)}"
            )
        if rows is not None and block_table is not None:
            raise ValueError(
                "cache_batch_idx and block_table are two ways to say the same: pass one"
            )
        self.k, self.v, self.rows, self.table = k, v, rows, block_table
        if rows is None and block_table is None and len(k) != batch:
            raise ValueError(
                f"k_cache has {len(k)} rows, q has {batch}: pass cache_batch_idx to say which"
            )
        for name, index in (("cache_batch_idx", rows), ("block_table", block_table)):
            if index is not None and len(index) != batch:
                raise ValueError(f"{name} must have B = {batch} rows: got {len(index)}")
        pages = 1 if block_table is None else block_table.shape[1]
        self.slots = pages * k.shape[1]
        given = self.slots if lengths is None else lengths
        counts = torch.as_tensor(given, device=k.device).to(torch.int64)
        if counts.shape not in ((), (batch,)):
            raise ValueError(
                f"cache_seqlens must be one number or [B] = [{batch}]: got {list(counts.shape)}"
            )
        self.lengths = counts.expand(batch)
        self._check_room()

    def _check_room(self) -> None:
        longest = int(self.lengths.amax()) if self.lengths.numel() else 0
        if not 0 <= longest <= self.slots:
            raise ValueError(f"the cache holds {self.slots} tokens a row: {longest} do not fit")

    def append(self, k: Tensor, v: Tensor) -> None:
        """Writes ``[B, n, G, D]`` keys and values after the tokens that are there."""
        slots = self.lengths[:, None] + torch.arange(k.shape[1], device=k.device)
        self.lengths = self.lengths + k.shape[1]
        self._check_room()
        if self.table is not None:
            size = self.k.shape[1]
            place = self.table.to(torch.int64).gather(1, slots // size), slots % size
        else:
            rows = torch.arange(len(slots), device=k.device) if self.rows is None else self.rows
            place = rows.to(torch.int64)[:, None].expand_as(slots), slots
        self.k[place] = k.to(self.k.dtype)
        self.v[place] = v.to(self.v.dtype)

    def read(self) -> tuple[Tensor, Tensor]:
        """``[B, S, G, D]`` keys and values up to the longest row; a view unless rows are chosen."""
        longest = int(self.lengths.amax()) if self.lengths.numel() else 0
        if self.table is not None:
            keys, values = (paged(x, self.table, longest) for x in (self.k, self.v))
            return keys, values
        keys, values = self.k[:, :longest], self.v[:, :longest]
        return (keys, values) if self.rows is None else (keys[self.rows], values[self.rows])


def paged(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first tokens ``[…, length, G, D]`` of sequences whose pages ``table [..., n]`` lists."""
    size = pages.shape[1]
    needed = -(-length // size)
    if needed > table.shape[-1]:
        raise ValueError(
            f"block_table lists {table.shape[-1]} pages of {size} tokens a row: {length} tokens "
            "need more"
        )
    return pages[table[..., :needed].to(torch.int64)].flatten(-4, -3)[..., :length, :, :]


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the first R features (Su et al. 2021).

    Args:
        x: ``[B, n, heads, D]``.
        positions: ``[B, n]``.
        cos: ``[positions, R / 2]``.
        interleaved: Pairs are features 0 and 1, 2 and 3, …; else 0 and R / 2, 1 and R / 2 + 1, ….
    """
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            "rotary_cos and rotary_sin must be [positions, R / 2] with R at most the head size "
            f"{x.shape[-1]}: got {list(cos.shape)} and {list(sin.shape)}"
        )
    if positions.numel() and int(positions.amax()) >= len(cos):
        raise ValueError(
            f"rotary_cos ends at position {len(cos) - 1}: {int(positions.amax())} is needed"
        )
    precise, R = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[1]
    c, s = (table[positions][:, :, None].to(precise) for table in (cos, sin))
    turned, rest = x[..., :R].to(precise), x[..., R:]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([first * c - second * s, first * s + second * c], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        pairs = torch.cat([first * c - second * s, first * s + second * c], dim=-1)
    return torch.cat([pairs.to(x.dtype), rest], dim=-1)
