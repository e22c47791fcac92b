"""Everything that one layer remembers, under one count of tokens per row.

A layer whose only memory is keys and values has a ``StoredCache``. Any other has a ``LayerCache``
of named memories: ``PerToken`` ones lie in a ``StoredCache`` each, the others in ``parts``. A call
is a step::

    with cache.step(x, positions) as step:
        xs = step.pack(x)                            # real tokens first in each row
        inputs = step.tail("conv", xs)               # [B, tokens + T, W]
        for piece in step.pieces:                    # one piece, or the last few tokens singly
            state = step.state("state")              # [B, *shape]: update it in place
        source = step.append("kv", k, v)             # attention(q, source)
    y = step.unpack(ys)

A step that fails, or that leaves out a memory, leaves the cache as it was. What another layer
remembers is no part of it: such a layer's steps count tokens alone. A step within a step is that
step: a layer that remembers more than its attention begins one around both.

Shape letters: B batch, T new tokens, W width.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.caches.append_plan import plan_append
from polyhead.caches.choice import check_memories, layout_of, storage_of
from polyhead.caches.in_use import InUse, alone
from polyhead.caches.parts import Part, PooledPart, StatePart, TailPart, part_of
from polyhead.caches.protocol import Counts, SequenceCache, per_row
from polyhead.caches.sizes import Dense, Layout, Quantized
from polyhead.caches.stored import StoredCache
from polyhead.config.memories import Memory, check_spare
from polyhead.semantics.sources import KeyValueSource

_UNLIMITED = 1 << 48

_P = TypeVar("_P", bound=Part)


class Packing:
    """Moves the real tokens of each row before its padding, and back.

    Args:
        padding: ``[B, T]`` bool; None: there is none.

    Attributes:
        real: ``[B, T]`` bool, which packed columns are real tokens; None: all.
    """

    def __init__(self, padding: Tensor | None) -> None:
        self.real: Tensor | None = None
        self._order: Tensor | None = None
        if padding is not None:
            self._order = padding.int().argsort(dim=1, stable=True)
            self.real = ~padding.gather(1, self._order)

    def pack(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` with the real tokens of each row first, then zeros."""
        if self._order is None or self.real is None:
            return x
        index = self._order.reshape(*self._order.shape, *[1] * (x.ndim - 2)).expand_as(x)
        real = self.real.reshape(*self.real.shape, *[1] * (x.ndim - 2))
        return x.gather(1, index).masked_fill(~real, 0)

    def unpack(self, y: Tensor) -> Tensor:
        """The inverse of ``pack``; zeros where tokens are padding."""
        if self._order is None:
            return y
        index = self._order.reshape(*self._order.shape, *[1] * (y.ndim - 2)).expand_as(y)
        return torch.zeros_like(y).scatter(1, index, y)


class Step(Packing):
    """One call of a layer; see the module.

    Attributes:
        counts: Real tokens of each row.
        before: Tokens that each row had.
        pieces: Columns of packed tokens to be taken one piece after the other by what updates a
            state, so that the state after each of the last ``spare`` tokens can be kept.
    """

    def __init__(
        self, cache: LayerCache, x: Tensor, positions: Tensor | None, counts: list[int]
    ) -> None:
        self._cache, self._positions = cache, positions
        self.counts, self.before = counts, cache.lengths
        T = x.shape[1]
        singly = min(cache.spare, T)
        edges = [0, *range(T - singly, T + 1)] if singly < T else [*range(T + 1)]
        self.pieces = [slice(a, b) for a, b in itertools.pairwise(edges)]
        padding = None
        if any(count != T for count in counts) and positions is not None:
            padding = (positions < 0).expand(len(counts), T).to(x.device)
        super().__init__(padding)
        self.used: dict[str, int] = dict.fromkeys(cache.names, 0)
        self.undo: dict[str, StoredCache | None] = {}

    def append(self, name: str, k: Tensor, v: Tensor) -> KeyValueSource:
        """Appends keys and values, as ``KeyValueCache.append``; not packed."""
        cache = self._cache._tokens[self._take(name, self._cache._tokens)]
        _refuse_gradients(name, k, v)
        held = all(map(cache.takes_back, self.counts, self.before))
        self.undo[name] = None if held else cache.fork()
        return cache.append(k, v, self._positions)

    def state(self, name: str) -> Tensor:
        """``[B, *shape]`` a state to be updated in place over the next piece."""
        part = self._part(name, StatePart, len(self.pieces))
        stop = self.pieces[self.used[name] - 1].stop
        held = zip(self.before, self.counts, strict=True)
        return part.advance([n + min(count, stop) for n, count in held])

    def tail(self, name: str, x: Tensor) -> Tensor:
        """``[B, tokens + T, W]``: the last inputs of a convolution, then ``x`` ``[B, T, W]``."""
        _refuse_gradients(name, x)
        return self._part(name, TailPart).push(x, self.counts, self.before)

    def pooled(self, name: str, entries: Tensor) -> Tensor:
        """``[B, N, W]``: all entries of whole units.

        Args:
            name: The memory.
            entries: ``[B, n, W]``, those that the new tokens complete, n of the row with most; a
                row with fewer takes its first ones.
        """
        _refuse_gradients(name, entries)
        return self._part(name, PooledPart).write(entries, self.counts, self.before)

    def _part(self, name: str, kind: type[_P], most: int = 1) -> _P:
        part = self._cache._parts[self._take(name, self._cache._parts, most)]
        if not isinstance(part, kind):
            raise ValueError(f"memory {name!r} is another kind: {self._cache.memories}")
        return part

    def _take(self, name: str, among: Mapping[str, Any], most: int = 1) -> str:
        if name not in among:
            raise ValueError(f"memory must be one of {', '.join(among) or 'none'}: got {name!r}")
        if self.used[name] >= most:
            raise ValueError(f"memory {name!r} has had all tokens of this step")
        self.used[name] += 1
        return name


class LayerCache(SequenceCache):
    """The memories of one layer.

    Args:
        memories: What it holds, as a head layout lists it.
        layout: Where keys and values of tokens lie; default ``Dense()``.
        quantized: Quantize old keys and values so; default: exact.
        capacity: Tokens per row to make room for keys and values at the first step.
        spare: Tokens that can always be rolled back where a state remembers no tokens; then one
            snapshot of the state for each.

    Raises:
        ConfigError: Memories of which there can be no cache.
    """

    def __init__(
        self,
        memories: tuple[Memory, ...],
        layout: Layout | None = None,
        *,
        quantized: Quantized | None = None,
        capacity: int = 0,
        spare: int = 0,
    ) -> None:
        check_memories(memories)
        self.memories, self.spare = memories, check_spare(spare)
        self.layout: Layout = Dense() if layout is None else layout
        self.in_use = InUse()
        self._lengths: list[int] = []
        self._open: Step | None = None
        self._tokens: dict[str, StoredCache] = {}
        self._parts: dict[str, Part] = {}
        for memory in memories:
            if (shape := memory.keys_and_values) is not None:
                where = layout_of(memory, self.layout, self.spare)
                storage = storage_of(shape, where, quantized)
                self._tokens[memory.name] = StoredCache(where, storage, capacity)
            elif memory.borrowed is None:
                self._parts[memory.name] = part_of(memory, self.spare)

    @property
    def names(self) -> list[str]:
        """Names of the memories, without those that another layer keeps."""
        return [memory.name for memory in self.memories if memory.borrowed is None]

    @contextmanager
    def step(self, x: Tensor, positions: Tensor | None = None) -> Iterator[Step]:
        """A call of the layer with more tokens; within one, that call.

        Args:
            x: ``[B, T, E]``, the layer's input.
            positions: ``[T]`` or ``[B, T]``, below 0 for padding; default: they follow on.

        Raises:
            ValueError: Batch or positions do not fit, or a memory was left out; the cache is then
                as it was, and so it is if anything within the step fails.
        """
        with self.in_use:
            if self._open is not None:
                yield self._open
                return
            B, T = x.shape[:2]
            fresh = not any(self._lengths)
            before = [0] * B if fresh else self._lengths
            if len(before) != B:
                raise ValueError(f"x must have batch {len(before)}, as the cache: got {B}")
            new = plan_append(B, T, before, positions, explicit=False, states=before)
            if fresh:
                for part in self._parts.values():
                    part.start(B, x)
                self._lengths = before
            step = Step(self, x, positions, new.counts)
            marks = {name: part.before() for name, part in self._parts.items()}
            try:
                self._open = step
                yield step
                self._check_whole(step)
            except BaseException:
                self._undo(step, marks)
                if fresh:
                    self._lengths = []
                raise
            finally:
                self._open = None
            self._lengths = [n + more for n, more in zip(before, new.counts, strict=True)]

    def _check_whole(self, step: Step) -> None:
        for name, used in step.used.items():
            part = self._parts.get(name)
            if used != (len(step.pieces) if isinstance(part, StatePart) else 1):
                raise ValueError(f"memory {name!r} has not had all tokens of this step")

    def _undo(self, step: Step, marks: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.undo(marks[name])
        for name, kept in step.undo.items():
            if kept is not None:
                self._tokens[name] = kept
            elif self._tokens[name].lengths:  # not so if its first append failed
                self._tokens[name].crop(step.before)

    @property
    def lengths(self) -> list[int]:
        return [*self._lengths]

    @property
    def even(self) -> bool:
        return super().even and all(cache.even for cache in self._tokens.values())

    @property
    def capacity(self) -> int:
        return min((cache.capacity for cache in self._tokens.values()), default=_UNLIMITED)

    @property
    def bytes(self) -> int:
        held = sum(t.nbytes for part in self._parts.values() for t in part.tensors)
        return held + sum(cache.bytes for cache in self._tokens.values())

    @property
    def used_bytes(self) -> int:
        held = sum(t.nbytes for part in self._parts.values() for t in part.tensors)
        return held + sum(cache.used_bytes for cache in self._tokens.values())

    @property
    def max_rollback(self) -> int:
        most = min((cache.max_rollback for cache in self._tokens.values()), default=_UNLIMITED)
        bounded = any(part.bounded for part in self._parts.values())
        for row, length in enumerate(self._lengths if bounded else ()):
            back = 0
            while back < min(most, length) and self._blocks(row, length - back - 1) is None:
                back += 1
            most = min(most, back)
        return min(most, *self._lengths, _UNLIMITED) if self._lengths else 0

    def _blocks(self, row: int, target: int) -> str | None:
        """The memory that cannot take a row back to ``target`` tokens, or None."""
        if not target:
            return None
        parts = self._parts.items()
        return next((name for name, part in parts if not part.reaches(row, target)), None)

    def check_rollback(self, count: Counts) -> list[int]:
        lengths = self._lengths or [0]
        counts = per_row("rollback count", count, len(lengths))
        for row, (back, length) in enumerate(zip(counts, lengths, strict=True)):
            if back > length:
                raise ValueError(f"rollback count must be 0 to length={length} tokens: got {back}")
            if back and (name := self._blocks(row, length - back)) is not None:
                raise ValueError(
                    f"rollback count must be at most {self.max_rollback} tokens now, or all "
                    f"{length}: got {back}; memory {name!r} keeps no earlier state "
                    f"(spare={self.spare})"
                )
        for cache in self._tokens.values():
            if cache.lengths:
                cache.check_rollback(counts)
        return counts

    @alone
    def rollback(self, count: Counts) -> None:
        counts = self.check_rollback(count)
        for cache in self._tokens.values():
            if cache.lengths:
                cache.rollback(counts)
        for row, back in enumerate(counts if self._lengths else ()):
            if back:
                length = self._lengths[row]
                for part in self._parts.values():
                    part.cut(row, length, length - back)
                self._lengths[row] = length - back

    @alone
    def fork(self) -> Self:
        other = copy.copy(self)
        other.in_use = InUse()
        other._lengths = [*self._lengths]
        other._tokens = {name: cache.fork() for name, cache in self._tokens.items()}
        other._parts = {name: part.fork() for name, part in self._parts.items()}
        return other

    @alone
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        chosen = self.check_rows(rows)
        for cache in self._tokens.values():
            if cache.lengths:
                cache.reorder(chosen)
        for part in self._parts.values():
            part.reorder(chosen)
        self._lengths = [self._lengths[row] for row in chosen]

    @alone
    def reset(self) -> None:
        for cache in self._tokens.values():
            cache.reset()
        for row, length in enumerate(self._lengths):
            for part in self._parts.values():
                part.cut(row, length, 0)
            self._lengths[row] = 0

    def description(self) -> dict[str, Any]:
        kinds = {m.name: {"kind": type(m).__name__} | _plain(asdict(m)) for m in self.memories}  # type: ignore[call-overload]
        facts: dict[str, Any] = {"memories": kinds, "spare": self.spare}
        for name, cache in self._tokens.items():
            facts |= {f"{name}.{key}": fact for key, fact in cache.description().items()}
        return facts | ({"batch": len(self._lengths)} if self._lengths else {})

    @alone
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        facts = self.description() | {"lengths": self._lengths, "held": {}, "parts": {}}
        for name, cache in self._tokens.items():
            held, facts["held"][name] = cache.state()
            tensors |= {f"{name}.{key}": tensor for key, tensor in held.items()}
        for name, part in self._parts.items():
            held, facts["parts"][name] = part.save()
            tensors |= {f"{name}.{key}": tensor for key, tensor in held.items()}
        return tensors, facts

    @alone
    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None:
        lengths = [check_int("lengths", n, least=0, most=_UNLIMITED) for n in facts["lengths"]]
        left = dict(tensors)
        for name, cache in self._tokens.items():
            prefix = f"{name}."
            mine = {k.removeprefix(prefix): left.pop(k) for k in tensors if k.startswith(prefix)}
            cache.restore(mine, facts["held"][name], device)
            if (cache.lengths or [0] * len(lengths)) != lengths:
                raise ValueError(f"memory {name!r} must hold {lengths} tokens: {cache.lengths}")
        for name, part in self._parts.items():
            mine = {k: left.pop(k) for k in tensors if k.startswith(f"{name}.")}
            if len(mine) != (1 if lengths else 0):
                raise ValueError(f"memory {name!r} must have one tensor: got {sorted(mine)}")
            for tensor in mine.values():
                part.load(tensor, facts["parts"][name], lengths, device)
        if left:
            raise ValueError(f"no tensor may be called {sorted(left)[0]!r}")
        self._lengths = lengths

    def __repr__(self) -> str:
        return f"LayerCache({', '.join(self.names)}; {self.length} tokens, {self.bytes:,} bytes)"


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON gives them back."""
    return {name: [*x] if isinstance(x, tuple) else x for name, x in facts.items()}


def _refuse_gradients(name: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"memory {name!r} cannot carry a gradient: call the layer under torch.no_grad(), or "
            "without a cache"
        )
