"""A cache that evicts keys, by the weights of attention or by age: lossy, in bounded memory.

``append`` returns a source whose ``observer`` a layer calls after attention: from queries and lse
the cache recomputes the weights of its keys, and then it keeps the new tokens and evicts. Which
tokens remain differs from kv head to kv head; how many does not. All later queries see what
remains, so a source gives held keys places just before those of the new ones.

Shape letters: B batch, G kv heads, S keys of a call, T new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from polyhead.caches.append_plan import AppendPlan, plan_append
from polyhead.caches.codecs import KVChunk
from polyhead.caches.evicted_keys import keep, last_queries, staying, weights_of_keys
from polyhead.caches.eviction import Evicting
from polyhead.caches.in_use import alone
from polyhead.caches.layer_kv import LayerKV
from polyhead.caches.memory import with_one
from polyhead.caches.protocol import Counts
from polyhead.caches.source import NO_POSITION, SlotMask
from polyhead.caches.stored import StoredCache
from polyhead.caches.views import without_places
from polyhead.errors import UnsupportedError
from polyhead.semantics.biases import ALiBi, RelativeBias
from polyhead.semantics.call import Specification
from polyhead.semantics.masks import Causal
from polyhead.semantics.sources import KeyValueSource
from polyhead.semantics.tokens import Tokens, active_capture


class _Awaiting(NamedTuple):
    """A call whose queries have not been observed: the cache is as it was before.

    ``positions`` are ``[B, T]``, below 0 for padding; ``evicts`` says it of each row.
    """

    source: KeyValueSource
    chunk: KVChunk
    new: AppendPlan
    positions: Tensor
    evicts: list[bool]


class EvictingCache(StoredCache):
    """Keys and values of one layer of softmax attention, of which some are lost for good.

    For ``MultiHeadAttention`` with no mask but ``Causal()``, and without biases except biases by
    distance with ``StreamingLLM``: others are refused. Rollbacks go back to what no eviction, and
    with ``H2O`` no weight, depends on. Layers run as modules, outside of the native decode plan;
    there are no gradients. Who calls ``append`` without a layer shows the queries to the source's
    ``observer``, where it has one, and with ``StreamingLLM`` rotates keys by ``places``.

    Args:
        layout: ``H2O(budget)``, ``SnapKV(budget)`` or ``StreamingLLM(budget)``.
        capacity: Tokens per row to make room for at the first append, at most the budget.

    Raises:
        ConfigError: Another layout.
        ValueError: A negative capacity.
    """

    _evicts = True
    layout: Evicting

    def __init__(self, layout: Evicting, capacity: int = 0) -> None:
        super().__init__(layout, None, capacity)
        self._reserved = min(self._reserved, layout.budget)
        self.rotates_late = not self.layout.by_weight
        self._settled: list[int] = []  # lengths behind which nothing can be taken back
        self._awaiting: _Awaiting | None = None

    def __repr__(self) -> str:
        held = 0 if self._contents is None else max(self._contents.main.stops)
        return (
            f"{type(self).__name__}({self.layout!r}, {held} of {self.length} tokens kept, "
            f"{self.bytes:,} bytes)"
        )

    @property
    def even(self) -> bool:
        one_length = super().even and self._lengths.count(self.length) == len(self._lengths)
        return one_length and not (self.rotates_late and any(self.evicted))

    @property
    def evicted(self) -> list[int]:
        """Tokens of each batch row that are lost."""
        if self._contents is None:
            return [0] * len(self._lengths)
        stops = self._contents.main.stops
        return [length - stop for length, stop in zip(self._lengths, stops, strict=True)]

    def places(self, positions: int | Tensor) -> int | Tensor:
        if not isinstance(positions, Tensor):
            return positions  # nothing has been evicted: else rows are not even
        evicted = torch.tensor(self.evicted or [0], device=positions.device)
        return (positions - evicted[:, None]).masked_fill(positions >= NO_POSITION, 0).clamp(min=0)

    @property
    def positions(self) -> Tensor:
        """``[B, G, S]`` positions of the tokens that each kv head still has; −1: no token."""
        rows = self._held().main
        nowhere = (rows.units(0, rows.extent) < 0).to(rows.device)[:, None]
        return rows.read(0, rows.extent, only=-1)[0][..., 0].masked_fill(nowhere, -1)

    @alone
    def append(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> KeyValueSource:
        self._refuse_awaiting()
        if active_capture() is not None:
            raise UnsupportedError("a captured step cannot evict: which keys stay differs")
        chunk, shape = self._checked(k, v)
        contents, lengths, settled = self._contents, self._lengths, self._settled
        if contents is None or contents.shape != shape:
            contents = LayerKV(self.layout, self.storage, shape, self._reserved)
            lengths = settled = [0] * shape.batch
        held, T = contents.main.stops, k.shape[2]
        states = [*zip(lengths, held, strict=True)]
        new = plan_append(shape.batch, T, lengths, positions, explicit=False, states=states)
        if new.explicit:
            raise ValueError(
                "positions must follow on in each row, or be below 0 for padding, in an "
                f"EvictingCache, which counts tokens by them: got {positions}"
            )
        self._check_gradients(chunk, new)
        self._contents, self._lengths, self._settled = contents, lengths, settled
        where = new.positions
        if where is None:
            where = torch.tensor(lengths, device="cpu")[:, None] + torch.arange(T, device="cpu")
        where, evicts = where.to(shape.device), self.layout.evicts(held, new.counts)
        if not T:
            return self._view()
        if not self.layout.accumulates and not any(evicts):
            self._write(new, self._records(chunk, where))
            source = self._view()
            source.observer = partial(self._check, new.counts)
            return source
        source = self._view(chunk, where, even=self.even and min(new.counts) == T)
        source.observer = self._observe
        self._awaiting = _Awaiting(source, chunk, new, where, evicts)
        return source

    def source(self) -> KeyValueSource:
        return self._view()

    @alone
    def rollback(self, count: Counts) -> None:
        super().rollback(count)
        self._awaiting = None

    @alone
    def fork(self) -> Self:
        other = super().fork()
        other._awaiting = None
        return other

    @alone
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        self._refuse_awaiting()
        chosen = self.check_rows(rows)
        super().reorder(chosen)
        self._settled = [self._settled[row] for row in chosen]

    @alone
    def reset(self) -> None:
        super().reset()
        self._awaiting = None

    @alone
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors, facts | {"settled": self._settled}

    @alone
    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None:
        super().restore(tensors, facts, device)
        settled, lengths = facts["settled"], self._lengths
        stops = lengths if self._contents is None else self._contents.main.stops
        # What can be taken back is held.
        if len(settled) != len(lengths) or not all(
            type(n) is int and length - stop <= n <= length
            for n, length, stop in zip(settled, lengths, stops, strict=True)
        ):
            raise ValueError(f"settled contradicts lengths={lengths}, stops={stops}: got {settled}")
        self._settled, self._awaiting = [*settled], None

    def _most(self, row: int, length: int) -> int:
        return length - self._settled[row] if self._settled else 0

    def _cut(self, row: int, length: int) -> None:
        if self._contents is not None:
            stop = self._contents.main.stops[row] - self._lengths[row] + length
            self._contents.cut(row, stop if length else 0)
            self._settled = with_one(self._settled, row, min(self._settled[row], length))
        self._lengths = with_one(self._lengths, row, length)

    def _why_not_further(self) -> str:
        return f"{self.layout} has evicted keys, or added up weights, by what those tokens saw"

    def _held(self) -> LayerKV:
        if self._contents is None:
            raise ValueError("this cache holds no tokens yet: append some first")
        return self._contents

    def _refuse_awaiting(self) -> None:
        if self._awaiting is not None:
            raise ValueError(
                f"{self.layout} chooses by the weights of the last call's queries, which have not "
                "been observed: layers show them (source.observer); rollback(0) drops the call"
            )

    def _records(
        self, chunk: KVChunk, where: Tensor, weights: Tensor | None = None
    ) -> list[Tensor]:
        """The fields of new tokens at ``where [B, T]``, with weights ``[B, G, T]``."""
        found = chunk.tensors()
        if weights is not None and self.layout.accumulates:
            found.append(weights[..., None])
        return [*found, where[:, None, :, None].expand(*chunk.k.shape[:3], 1)]

    def _view(
        self, chunk: KVChunk | None = None, where: Tensor | None = None, *, even: bool | None = None
    ) -> KeyValueSource:
        """What is held, and a chunk that is not, at ``where [B, T]``; ``even`` as ``self.even``."""
        even = self.even if even is None else even
        before = None
        if self.rotates_late and not even:
            positions = self.positions[:, 0]
            lost = torch.tensor(self.evicted, device=positions.device)[:, None]
            first = (positions >= 0) & (positions < self.layout.budget - self.layout.last_tokens)
            before = torch.where(first, positions + lost, positions)
        return without_places(self._held(), self._lengths, chunk, where, before, even=even)

    @alone
    @torch.no_grad()
    def _observe(self, q: Tensor, lse: Tensor, spec: Specification, q_tokens: Tokens) -> None:
        """Keeps the new tokens, adds up the weights that their queries gave, and evicts."""
        awaiting, self._awaiting = self._awaiting, None
        rows = self._held().main
        if awaiting is None:
            raise UnsupportedError(f"{self!r} serves one attention of each call: got another")
        self._check([0] * len(self._lengths), q, lse, spec, q_tokens)
        if q.shape[2] != awaiting.positions.shape[1]:
            raise UnsupportedError("an EvictingCache is for self-attention: got another's queries")
        if (count := self.layout.last_queries) is not None:
            real = awaiting.positions >= 0
            q, lse, q_tokens = last_queries(q, lse, q_tokens, real, count)
        source = awaiting.source
        if self.layout.by_weight:
            weights = weights_of_keys(source, q, lse, spec, q_tokens)
        else:
            weights = q.new_zeros(source.batch, source.num_kv_heads, source.tokens.length)
        held, new = weights[:, :, : rows.extent], weights[:, :, rows.extent :]
        if self.layout.accumulates:
            held += rows.read(0, rows.extent, only=2)[0][..., 0]
        records = self._records(awaiting.chunk, awaiting.positions, new)
        if any(awaiting.evicts):
            self._evict(awaiting, weights, records)
        else:
            rows.read(0, rows.extent, only=2)[0][..., 0] = held
            self._write(awaiting.new, records)
        self._settled = [
            length if evicted or self.layout.accumulates else before
            for length, before, evicted in zip(
                self._lengths, self._settled, awaiting.evicts, strict=True
            )
        ]

    def _check(
        self, counts: list[int], q: Tensor, lse: Tensor, spec: Specification, q_tokens: Tokens
    ) -> None:
        """Takes back the last tokens and raises where positions of keys would matter."""
        by_distance = self.rotates_late and isinstance(spec.bias, ALiBi | RelativeBias)
        plain = type(spec.mask) in (type(None), Causal, SlotMask)
        if not plain or not (spec.bias is None or by_distance):
            self.rollback(counts)
            why = "since heads differ in which keys they hold"
            if self.rotates_late:
                why = "or one by distance, since positions are places in the cache"
            raise UnsupportedError(
                f"an EvictingCache of {self.layout} takes mask=Causal() or None and no bias, {why}"
                f": got mask={spec.mask}, bias={spec.bias}"
            )

    def _write(self, new: AppendPlan, records: list[Tensor]) -> None:
        """Appends tokens to rows that evict none."""
        for rows, columns in new.groups:
            part = records if rows is None else [x[rows] for x in records]
            part = part if columns is None else [x[:, :, columns] for x in part]
            self._held().main.write(rows, part)
        self._lengths = [n + more for n, more in zip(self._lengths, new.counts, strict=True)]

    def _evict(self, awaiting: _Awaiting, weights: Tensor, records: list[Tensor]) -> None:
        """Keeps the highest ranked of the keys held and the new ones, and the most recent."""
        rows, budget, extent = self._held().main, self.layout.budget, self._held().main.extent
        arrived = [*zip(rows.stops, awaiting.new.counts, awaiting.evicts, strict=True)]
        stops = [budget if evicts else held + more for held, more, evicts in arrived]
        lengths = [n + more for n, more in zip(self._lengths, awaiting.new.counts, strict=True)]
        positions = torch.cat((self.positions, records[-1][..., 0]), dim=2)
        stays = staying(self.layout, weights, positions, lengths, stops)
        rows.reserve(max(stops))
        if self.layout.accumulates:
            rows.read(0, extent, only=2)[0][..., 0] = weights[:, :, :extent]
        keep(rows, records, stays, stops)
        self._lengths = lengths
