"""A cache is a storage (how tokens are encoded) in a layout (where they lie).

Every public cache class is this one with another pair; other pairs work too.

Shape letters: B batch, G kv heads, T new tokens, D key size, V value size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.caches.append_plan import AppendPlan, plan_append
from polyhead.caches.codecs import KVChunk
from polyhead.caches.eviction import Evicting
from polyhead.caches.in_use import InUse, alone
from polyhead.caches.layer_kv import LayerKV, Shape, latent_of
from polyhead.caches.memory import with_one
from polyhead.caches.pages import Pages
from polyhead.caches.protocol import Counts, KeyValueCache, per_row
from polyhead.caches.reserved import Undo, reserve_slots, write_at
from polyhead.caches.saved import checked, described, saved
from polyhead.caches.sizes import Dense, Layout, Plain, Quantized, Ring, Storage, units
from polyhead.caches.views import row_by_row, selected, view, with_chunk
from polyhead.errors import ConfigError
from polyhead.native.arguments import CacheSegment
from polyhead.semantics.sources import KeyValueSource, are_first_features
from polyhead.semantics.tokens import active_capture

_NAMES = ("batch", "kv heads", "head size", "head size", "dtype", "device")


class StoredCache(KeyValueCache):
    """Remembers the tokens of one layer.

    Nothing is allocated before the first ``append``, which also settles batch, heads, sizes, dtype
    and device. Gradients flow through a dense layout of exact tokens, which then makes new tensors
    instead of writing into its own.

    Args:
        layout: ``Dense()``, ``Ring(window)`` or ``Paged(page_size)``.
        storage: ``Plain()``, ``Latent(rank, rope)`` or ``Quantized(...)``.
        capacity: Tokens per row to make room for at the first append; it grows when more come.

    Raises:
        ValueError: A negative capacity, or a layout and storage that do not go together.
    """

    layout: Layout
    _evicts: ClassVar[bool] = False

    def __init__(
        self, layout: Layout | None = None, storage: Storage | None = None, capacity: int = 0
    ) -> None:
        capacity = check_int("capacity", capacity, least=0, error=ValueError)
        self.layout = Dense() if layout is None else layout
        if isinstance(layout, Evicting) is not self._evicts:
            wanted = "H2O, SnapKV or StreamingLLM" if self._evicts else "Dense, Ring or Paged"
            raise ConfigError(f"layout of a {type(self).__name__} must be {wanted}: got {layout!r}")
        self.storage: Storage = Plain() if storage is None else storage
        latent = latent_of(self.storage)
        key, value = 1, 1
        if latent is not None:
            key, value = latent.kv_lora_rank + latent.qk_rope_head_dim, latent.kv_lora_rank
        Shape(1, 1, key, value, torch.float32, torch.device("cpu")).stores(
            self.layout, self.storage
        )
        self._reserved = capacity
        self.in_use = InUse()
        self._contents: LayerKV | None = None
        self._lengths: list[int] = []
        self._undo: tuple[Undo, list[int]] | None = None
        self._explicit = False

    @property
    def lengths(self) -> list[int]:
        return [*self._lengths]

    @property
    def even(self) -> bool:
        return len(self._lengths) < 2 or self._contents is None or self._contents.even

    @property
    def length(self) -> int:
        return max(self._lengths) if self._lengths else 0

    @property
    def capacity(self) -> int:
        if self._contents is None:
            return 0
        return self._contents.main.capacity * self._contents.main.store.tokens

    @property
    def bytes(self) -> int:
        return sum(memory.bytes for memory in self._memories.values())

    @property
    def used_bytes(self) -> int:
        return sum(memory.used_bytes for memory in self._memories.values())

    @alone
    def append(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> KeyValueSource:
        contents = self._contents
        if positions is not None and active_capture() is not None:
            return write_at(positions, contents, k, v)
        if positions is None and contents is not None and contents.fits(k, v):
            room = contents.with_room(k.shape[2])
            if room is not None and k.shape[2]:  # without the rest, for every token and layer
                room.write(None, (k, v))
                self._lengths = [*room.stops]
                return view(contents, explicit=False)
            pages = contents.ragged_pages()
            if pages is not None and k.shape[2]:
                pages.append_to_each((k, v))
                self._lengths = [*pages.stops]
                return view(contents, explicit=False)
        stream, shape = self._checked(k, v)
        if contents is not None and contents.shape != shape:
            contents = None
        before = [0] * shape.batch if contents is None else self._lengths
        empty = not any(before)
        new = plan_append(
            shape.batch,
            k.shape[2],
            before,
            positions,
            explicit=self._explicit and not empty,
            states=[()] * shape.batch if contents is None else contents.states(),
        )
        self._check_gradients(stream, new)
        if contents is None:
            # Free the old tensors first: they may be as large as the new ones.
            self._contents = None
            self._contents = contents = LayerKV(self.layout, self.storage, shape, self._reserved)
        if new.explicit or contents.has_positions:
            contents.add_positions()
        past, held = None, contents
        pushes = [self._pushes(*each) for each in zip(new.counts, before, strict=True)]
        if any(pushes) and not empty:
            # A long chunk's first queries still see what the chunk pushes out of a ring.
            held = contents.fork()
            past = view(held, explicit=self._explicit)
        self._explicit = new.explicit
        for rows, columns in new.groups:
            part = selected(contents, stream, new, before, rows, columns)
            contents.write(rows, part, before[0 if rows is None else rows[0]])
        self._lengths = [n + more for n, more in zip(before, new.counts, strict=True)]
        if not any(pushes):
            return self.source()
        pushed = with_chunk(past, stream, new, before, contents, held, explicit=new.explicit)
        if all(pushes) or not isinstance(self.storage, Quantized):
            return pushed
        # The chunk itself is read unencoded, so a row's result does not depend on other rows.
        return row_by_row(pushes, pushed, contents, explicit=new.explicit)

    def source(self) -> KeyValueSource:
        if self._contents is None:
            raise ValueError("this cache holds no tokens yet: append some first")
        return view(self._contents, explicit=self._explicit)

    @property
    def max_rollback(self) -> int:
        return min((self._most(row, length) for row, length in enumerate(self._lengths)), default=0)

    def check_rollback(self, count: Counts) -> list[int]:
        lengths = self._lengths or [0]
        counts = per_row("rollback count", count, len(lengths))
        for row, (back, length) in enumerate(zip(counts, lengths, strict=True)):
            if back > length:
                raise ValueError(f"rollback count must be 0 to length={length} tokens: got {back}")
            if back < length and back > (most := self._most(row, length)):
                raise ValueError(
                    f"rollback count must be at most {most} tokens now, or all {length}: got "
                    f"{back}; {self._why_not_further()}"
                )
        return counts

    @alone
    def rollback(self, count: Counts) -> None:
        for row, back in enumerate(self.check_rollback(count)):
            if back:
                self._cut(row, self._lengths[row] - back)

    @alone
    def fork(self) -> Self:
        other = copy.copy(self)
        other.in_use = InUse()
        other._lengths = [*self._lengths]
        other._undo = None
        other._contents = None if self._contents is None else self._contents.fork()
        return other

    @alone
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        chosen = self.check_rows(rows)
        if self._contents is not None:
            self._contents.reorder(chosen)
        self._lengths = [self._lengths[row] for row in chosen]

    @alone
    def reset(self) -> None:
        for row in range(len(self._lengths)):
            self._cut(row, 0)
        self._explicit = False

    @alone
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, stores = saved(self._memories)
        return tensors, self.description() | {
            "lengths": self._lengths,
            "explicit": self._explicit,
            "stores": stores,
        }

    @alone
    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None:
        if not facts["stores"]:
            self._contents, self._lengths, self._explicit = None, [], False
            return
        found = checked(self.layout, self.storage, tensors, facts, device)
        contents = LayerKV(self.layout, self.storage, found.shape, self._reserved)
        if found.positions:
            contents.add_positions()
        for name, memory in contents.memories.items():
            memory.restore(found.records[name], found.stops[name], found.firsts[name])
        self._contents, self._lengths = contents, found.lengths
        self._explicit = found.explicit

    def description(self) -> dict[str, Any]:
        shape = None if self._contents is None else self._contents.shape
        return described(self.layout, self.storage, shape)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.layout!r}, {self.storage!r}, {self.length} tokens, "
            f"{self.bytes:,} bytes)"
        )

    @property
    def _memories(self) -> Mapping[str, Any]:
        return {} if self._contents is None else self._contents.memories

    def _most(self, row: int, length: int) -> int:
        return 0 if self._contents is None else self._contents.max_rollback(row, length)

    def _cut(self, row: int, length: int) -> None:
        if self._contents is not None:
            self._contents.cut(row, length)
        self._lengths = with_one(self._lengths, row, length)

    def reserve_slots(
        self,
        shape: tuple[Any, ...] | None,
        count: int | Sequence[int],
        window: int | None = None,
    ) -> list[CacheSegment] | None:
        """Reserves slots for more tokens in every row; the caller writes their keys and values.

        The caller holds the lock ``in_use``; ``release_slots`` gives the slots back.

        Args:
            shape: What the caller is going to write, the fields of ``Shape``; None: what is held.
            count: Tokens for every row, or for each.
            window: As in ``reserved.reserve_slots``.

        Returns:
            Where the tokens that they see lie, in order, the last ``count`` still to be written.
            None, and nothing is counted, unless ``append`` would only write.
        """
        contents = self._contents
        if contents is None or shape not in (None, contents.shape):
            return None
        if (found := reserve_slots(contents, count, window)) is None:
            return None
        if isinstance(found.before.memory, Pages):
            self.in_use.afterwards(found.before.memory.pool.end_writing)
        # Without ``held``: its tensors would stay alive when these rows grow.
        before, lengths = self._undo = found.before, self._lengths
        if before.stops == lengths:  # then so are they now
            self._lengths = before.memory.stops
        else:
            counts = [count] * len(lengths) if isinstance(count, int) else count
            self._lengths = [n + more for n, more in zip(lengths, counts, strict=True)]
        return found.held

    def release_slots(self) -> None:
        """Undoes the last ``reserve_slots``, whose tokens have not been written."""
        if self._undo is not None:
            before, self._lengths = self._undo
            before.restore()
            self._undo = None

    def join(self, lengths: list[int]) -> None:
        """Takes a list that equals its counts for its own (``together.py``)."""
        if self._contents is not None and self._contents.exact is not None:
            self._lengths = self._contents.exact.stops = lengths
            self._undo = None  # what it would take back is soon not the last

    def held(self) -> CacheSegment | None:
        """Where all tokens lie: keys ``[B, G, n, D]``, values, the first of them and how many.

        None unless they are exact, at places that are their positions, and in one piece.
        """
        rows = None if self._contents is None else self._contents.with_room(0)
        if rows is None or type(self.layout) is not Dense or not rows.stops[0]:
            return None
        (span,) = rows.spans(0, rows.stops[0])
        k, v = rows.tensors
        return CacheSegment(k, v, span.address, span.length)

    @property
    def pages(self) -> Pages | None:
        """The pages of exact tokens whose positions are their places; None: kept otherwise."""
        contents = self._contents
        return None if contents is None or contents.has_positions else contents.paged

    def append_rows(self, table: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Adds rows that begin with pages of the same pool; where tokens lie in ``pages``.

        Args:
            table: Page numbers of each row.
            lengths: Tokens that each row holds in its pages.
        """
        if self._contents is not None:
            self._contents.extend(table, lengths)
            self._lengths = [*self._lengths, *lengths]

    def takes_back(self, count: int, length: int) -> bool:
        """Whether a row of ``length`` tokens that gets ``count`` more can give them back, and is
        then as it was for every later query."""
        if isinstance(self.storage, Quantized):
            held = [units(self.storage, n)["codes"] for n in (length, length + count)]
            if held[0] != held[1]:
                return False
        return not self._pushes(count, length)

    def _pushes(self, count: int, before: int) -> bool:
        """Whether appending takes keys out of a ring that the first new queries still see."""
        if not isinstance(self.layout, Ring):
            return False
        held = self.layout.window + self.layout.spare
        return count > self.layout.spare + 1 and before + count > held

    def _checked(self, k: Tensor, v: Tensor) -> tuple[KVChunk, Shape]:
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
        if not k.is_floating_point():
            raise ValueError(f"k and v must be floating-point: got {k.dtype}")
        shape = Shape(k.shape[0], k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
        held = None if self._contents is None else self._contents.shape
        if shape != held:
            if held is not None and any(self._lengths):
                for i, (what, got, want) in enumerate(zip(_NAMES, shape, held, strict=True)):
                    if got != want:
                        raise ValueError(
                            f"{'v' if i == 3 else 'k'} does not fit this cache: it holds {what} "
                            f"{want}, got {got}"
                        )
            shape.stores(self.layout, self.storage)
        if latent_of(self.storage) is None:
            return KVChunk(k, v), shape
        if not are_first_features(v, k) and not torch.equal(v, k[..., : v.shape[-1]]):
            raise ValueError(
                f"v must be the first {v.shape[-1]} columns of k: a latent cache keeps them once"
            )
        return KVChunk(k, None), shape

    def _check_gradients(self, stream: KVChunk, new: AppendPlan) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [t for memory in self._memories.values() for t in memory.tensors]
        if not any(tensor.requires_grad for tensor in (*stream.tensors(), *tensors)):
            return
        if not isinstance(self.layout, Dense) or isinstance(self.storage, Quantized):
            raise ValueError(
                f"k or v requires a gradient, which a {type(self).__name__} cannot carry: append "
                "under torch.no_grad(), or use a DenseCache"
            )
        if new.groups[0][0] is not None:
            raise ValueError(
                "k or v requires a gradient, which rows that differ in length cannot carry: "
                "append under torch.no_grad()"
            )

    def _why_not_further(self) -> str:
        reasons = []
        if isinstance(self.layout, Ring):
            reasons.append(
                f"a ring of window={self.layout.window} and spare={self.layout.spare} has "
                "forgotten what earlier queries would see"
            )
        if isinstance(self.storage, Quantized):
            reasons.append(
                f"older tokens are quantized in groups of {self.storage.group} and stay so "
                f"(recent={self.storage.recent})"
            )
        return "; ".join(reasons)
