"""What a cache should remember, kept as lists of tokens, and attention worked out from them.

A token is its keys ``[G, D]`` and values ``[G, V]``. Nothing here knows how tokens are stored: rows
are lists, a window is a mask, and attention is the formula in float64, one row at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyhead.caches.codecs import Codes, KVChunk
from polyhead.caches.sizes import Layout, Quantized, Ring, Storage

H = 4
"""Query heads."""


@dataclass
class Row:
    """One sequence.

    Attributes:
        keys: One ``[G, D]`` per token.
        values: One ``[G, V]`` per token.
        encoded: Tokens that have been quantized, sinks included.
        ever: The longest that this row has been since it was last empty.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    encoded: int = 0
    ever: int = 0

    def copy(self) -> Row:
        return Row([*self.keys], [*self.values], self.encoded, self.ever)

    def cut(self, length: int) -> None:
        del self.keys[length:], self.values[length:]
        if not length:
            self.encoded = self.ever = 0

    def append(self, k: Tensor, v: Tensor, storage: Storage) -> None:
        """``k [G, n, D]``, ``v [G, n, V]``."""
        self.keys += k.unbind(1)
        self.values += v.unbind(1)
        length = len(self.keys)
        self.ever = max(self.ever, length)
        if isinstance(storage, Quantized):
            self.encoded = max(self.encoded, min(length, storage.sink_tokens))
            more = length - self.encoded - storage.recent
            if length > storage.sink_tokens:
                self.encoded += max(0, more) // storage.group * storage.group

    def seen(self, storage: Storage) -> tuple[Tensor, Tensor]:
        """Keys ``[G, S, D]`` and values ``[G, S, V]`` as they are remembered."""
        k, v = torch.stack(self.keys, 1), torch.stack(self.values, 1)
        if isinstance(storage, Quantized) and self.encoded > storage.sink_tokens:
            part = slice(storage.sink_tokens, self.encoded)
            codec = Codes(storage, k.shape[-1], v.shape[-1], k.dtype)
            stream = KVChunk(k[None, :, part], None if storage.latent else v[None, :, part])
            k, v = k.clone(), v.clone()
            k[:, part], v[:, part] = (x[0] for x in codec.decode(codec.encode(stream)))
        return k, v

    def most_rollback(self, layout: Layout, storage: Storage) -> int:
        """Tokens that can be taken back without taking back all."""
        most = length = len(self.keys)
        if isinstance(storage, Quantized) and self.encoded > storage.sink_tokens:
            most = length - self.encoded
        if isinstance(layout, Ring):
            first = self.forgotten(layout, storage)
            if first:
                most = min(most, length - layout.window + 1 - first)
        return max(0, most)

    def forgotten(self, layout: Layout, storage: Storage) -> int:
        """Tokens at the start that a ring no longer holds."""
        if not isinstance(layout, Ring):
            return 0
        if isinstance(storage, Quantized):
            groups = max(1, -(-(layout.window + layout.spare - storage.recent) // storage.group))
            return max(0, self.encoded - groups * storage.group)
        return max(0, self.ever - layout.window - layout.spare)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: list[int], window: int | None) -> Tensor:
    """Causal attention ``[H, T, V]`` of ``q [H, T, D]`` at these positions over ``k [G, S, D]``."""
    groups = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(groups, 0) for x in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    apart = torch.tensor(positions)[:, None] - torch.arange(k.shape[1])
    visible = apart >= 0
    if window is not None:
        visible &= apart < window
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
