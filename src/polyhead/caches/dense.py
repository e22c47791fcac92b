"""The dense cache: keys and values in order, in two tensors that double as they fill.

Doubling reallocates at most log2(length) times and copies every token once more on average. Keys
are moved before the buffer for values is made, so at the peak of a growth 1.25 times the new
capacity is alive.

Shape letters: B batch, G kv heads, S capacity, T new tokens, D key size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.caches.protocol import KeyValueCache
from polyhead.semantics.sources import DenseSource

_BLOCK = 64
_KIND = ("batch", "kv heads", "head size", "dtype", "device")


class DenseCache(KeyValueCache):
    """Remembers every token of one layer, in ``[B, G, S, D]`` buffers.

    Nothing is allocated before the first ``append``, which also settles batch, heads, sizes, dtype
    and device. While gradients are recorded, appending makes new tensors instead of writing into
    the buffers, so that gradients flow to every key and value.

    Args:
        capacity: Tokens to make room for at the first append; more are taken all the same.

    Raises:
        ValueError: A negative capacity.
    """

    def __init__(self, capacity: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0: got {capacity}")
        self._reserved = capacity
        self._length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        # [1 or B, S] once a caller has given positions; None while they are 0, 1, 2, ...
        self._positions: Tensor | None = None

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return 0 if self._v is None else self._v.shape[2]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (self._k, self._v, self._positions) if t is not None)

    @property
    def used_bytes(self) -> int:
        return self.bytes * self._length // self.capacity if self.capacity else 0

    def append(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> DenseSource:
        held_k, held_v = self._k, self._v
        start = self._length
        if held_k is None or held_v is None or start == 0:
            self._check_new(k, v)
            held_k, held_v = self._reusable(k, v)
        else:
            self._check(k, v, held_k, held_v)
        count = k.shape[2]
        if positions is not None or (start and self._positions is not None):
            self._check_positions(positions, k.shape[0], count)

        stop = start + count
        if torch.is_grad_enabled() and (
            k.requires_grad or v.requires_grad or held_k.requires_grad or held_v.requires_grad
        ):
            held_k = torch.cat((held_k[:, :, :start], k), dim=2)
            held_v = torch.cat((held_v[:, :, :start], v), dim=2)
        else:
            if stop > held_v.shape[2]:
                capacity = _next_capacity(stop, held_v.shape[2])
                # Dropped before the values' buffer is made: see the module's docstring.
                self._k = held_k = _grown(held_k, start, capacity)
                self._v = held_v = _grown(held_v, start, capacity)
            held_k.narrow(2, start, count).copy_(k)
            held_v.narrow(2, start, count).copy_(v)
        self._k, self._v = held_k, held_v
        if positions is not None:
            self._positions = self._with_positions(positions, start, held_k)
        elif start == 0:
            self._positions = None
        self._length = stop
        return self._source(held_k, held_v, stop)

    def source(self) -> DenseSource:
        if self._k is None or self._v is None:
            raise ValueError("this cache holds no tokens yet: append some first")
        return self._source(self._k, self._v, self._length)

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._length:
            raise ValueError(
                f"rollback count must be 0 to length={self._length} tokens: got {count}"
            )
        self._length -= count

    def reset(self) -> None:
        self._length = 0
        self._positions = None

    def _source(self, k: Tensor, v: Tensor, length: int) -> DenseSource:
        positions = self._positions
        if positions is not None:
            positions = positions[0, :length] if len(positions) == 1 else positions[:, :length]
        return DenseSource(k.narrow(2, 0, length), v.narrow(2, 0, length), positions)

    def _reusable(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of an emptied cache where they fit what comes, new ones otherwise."""
        held_k, held_v = self._k, self._v
        if held_k is not None and held_v is not None and not held_k.requires_grad:
            try:
                self._check(k, v, held_k, held_v)
            except ValueError:
                pass
            else:
                return held_k, held_v
        # Freed first: what was held is not needed any more, and may be as large as the new.
        self._k = self._v = held_k = held_v = None
        capacity = _next_capacity(max(self._reserved, k.shape[2]), 0)
        return _grown(k, 0, capacity), _grown(v, 0, capacity)

    @staticmethod
    def _check_new(k: Tensor, v: Tensor) -> None:
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k must be [B, G, T, D] and v [B, G, T, V] with the same B, G, T: got "
                f"{list(k.shape)} and {list(v.shape)}"
            )
        if k.dtype != v.dtype or k.device != v.device:
            raise ValueError(
                f"k and v must share dtype and device: got {k.dtype} on {k.device} and {v.dtype} "
                f"on {v.device}"
            )

    @classmethod
    def _check(cls, k: Tensor, v: Tensor, held_k: Tensor, held_v: Tensor) -> None:
        cls._check_new(k, v)
        for name, new, held in (("k", k, held_k), ("v", v, held_v)):
            if _kind(new) == _kind(held):
                continue
            for what, got, want in zip(_KIND, _kind(new), _kind(held), strict=True):
                if got != want:
                    raise ValueError(
                        f"{name} does not fit this cache: it holds {what} {want}, got {got}"
                    )

    def _check_positions(self, positions: Tensor | None, batch: int, count: int) -> None:
        if positions is None:
            raise ValueError(
                "positions must be given at every append: this cache holds tokens with positions "
                "of their own"
            )
        if positions.shape not in ((count,), (1, count), (batch, count)):
            raise ValueError(
                f"positions must be [T] = [{count}] or [B, T] = [{batch}, {count}]: got "
                f"{list(positions.shape)}"
            )

    def _with_positions(self, new: Tensor, start: int, k: Tensor) -> Tensor:
        capacity = k.shape[2]
        rows = 1 if new.ndim == 1 else new.shape[0]
        held = self._positions
        if held is None and start:
            held = torch.arange(start, device=k.device)[None]
        if held is not None:
            rows = max(rows, len(held))
        if held is None or held.shape != (rows, capacity):
            with torch.inference_mode(False):
                fresh = torch.zeros(rows, capacity, dtype=torch.int64, device=k.device)
            if held is not None:
                fresh[:, :start] = held[:, :start]
            held = fresh
        held[:, start : start + new.shape[-1]] = new
        return held


def _next_capacity(needed: int, have: int) -> int:
    return max(-(-needed // _BLOCK) * _BLOCK, 2 * have)


def _kind(x: Tensor) -> tuple[int, int, int, torch.dtype, torch.device]:
    B, G, _, D = x.shape
    return B, G, D, x.dtype, x.device


def _grown(old: Tensor, keep: int, capacity: int) -> Tensor:
    """A buffer for ``capacity`` tokens that begins with the first ``keep`` of ``old``."""
    B, G, _, D = old.shape
    # An ordinary tensor in any mode: one made in inference mode could not be written to outside.
    with torch.inference_mode(False), torch.no_grad():
        new = torch.empty(B, G, capacity, D, dtype=old.dtype, device=old.device)
        if keep:
            new[:, :, :keep] = old[:, :, :keep]
    return new
