"""What is kept of one call of heads without a softmax: their rows are computed whole.

    o_t = Σ_s w_ts v_s        share_ts = |w_ts| / Σ_j |w_tj|

The weights w of heads that remember a state (``polyhead.recurrence_rows``), and those of a
normalizer, may be negative and add up to anything. Shares stand where a softmax has its weights,
and lse_t = log Σ_j |w_tj|: pictures, statistics and rows are theirs.

Letters: B batch, H heads, T queries, S keys, R rows, K key size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from polyhead.interpret.kept import KeptCall, own
from polyhead.layers.record import AttentionRecord
from polyhead.semantics import Causal, Specification, Tokens
from polyhead.semantics.normalizer import normalized
from polyhead.semantics.recurrence import weight_rows
from polyhead.semantics.recurrence_call import RecurrenceCall, with_heads
from polyhead.semantics.scores import accumulation_dtype, full_precision
from polyhead.semantics.weights import log_weight_rows

_ROWS = 512
"""Rows whose weights are computed together, in all heads."""

_blocks: WeakKeyDictionary[KeptRows, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()
"""The block of rows that was computed last, of any call: heads are asked for one after another."""


@dataclass(frozen=True, eq=False)
class KeptRows(KeptCall, ABC):
    """One call whose rows of weights are computed whole, in blocks."""

    @abstractmethod
    def _weights(self, start: int, stop: int) -> Tensor:
        """``[B, H, R, S]`` the weights of rows ``start`` to ``stop − 1``, with their signs."""

    def _measured(self) -> Self:
        """The same call with its lse."""
        for first in range(0, self.q_tokens.length, _ROWS):
            weights = self.signed(first, min(first + _ROWS, self.q_tokens.length))
            self.lse[:, :, first : first + _ROWS] = weights.abs().sum(dim=-1).log()
        return self

    @torch.no_grad()
    def signed(self, start: int, stop: int) -> Tensor:
        """``[B, H, R, S]`` the weights of rows ``start`` to ``stop − 1``, with their signs."""
        last = _blocks.get(self)
        if last is not None and last[0] == (start, stop):
            return last[1]
        with full_precision(self.q):
            found = self._weights(start, stop)
        _blocks.clear()
        _blocks[self] = (start, stop), found
        return found

    def row(self, query: int) -> Tensor:
        lse = self.lse[:, :, query, None]
        shares = self._of(query, query + 1)[:, :, 0].abs() * (-lse).exp()
        return shares.masked_fill(lse.isneginf(), 0.0)

    def log_weights(self, head: int, rows: Tokens, keys: Tokens) -> Tensor:
        start, stop = rows.start, rows.start + rows.length
        columns = slice(keys.start, keys.start + keys.length)
        weights = self._of(start, stop)[:, head : head + 1, :, columns]
        lse = self.lse[:, head : head + 1, start:stop, None]
        return (weights.abs().log() - lse).masked_fill(lse.isneginf(), -torch.inf)

    def _of(self, start: int, stop: int) -> Tensor:
        """``signed``, of a block of rows that is made once for all heads where it holds them."""
        first = start // _ROWS * _ROWS
        last = min(first + _ROWS, self.q_tokens.length)
        if stop <= last:
            return self.signed(first, last)[:, :, start - first : stop - first]
        return self.signed(start, stop)


@dataclass(frozen=True, eq=False)
class KeptRecurrence(KeptRows):
    """One recurrence over whole texts, without its values and its output.

    Attributes:
        recurrence: The call, each head with a query and a key of its own.
    """

    recurrence: RecurrenceCall | None = None

    @classmethod
    @torch.no_grad()
    def of_state(cls, call: RecurrenceCall) -> Self:
        """The call that a layer has shown."""
        H, T = call.heads, call.q.shape[2]
        q, k = (with_heads(x.detach(), H) for x in (call.q, call.k))
        decay, beta = (x if x is None else x.detach() for x in (call.decay, call.beta))
        none = k.new_zeros(k.shape[0], H, T, 1)
        return cls(
            q=q,
            k=k,
            lse=q.new_zeros(q.shape[:3], dtype=call.dtype),
            spec=Specification(call.scale, Causal()),
            q_tokens=Tokens.of(T),
            k_tokens=Tokens.of(T),
            kv_heads=tuple(range(H)),
            recurrence=replace(call, q=q, k=k, v=none, decay=decay, beta=beta),
        )._measured()

    def of_heads(self, heads: Sequence[int]) -> Self:
        chosen, call = list(heads), self._call

        def of(x: Tensor | None) -> Tensor | None:
            return x if x is None else x[chosen] if x.ndim == 1 else x[:, chosen]

        q, k = self.q[:, chosen], self.k[:, chosen]
        v = call.v[:, chosen]
        kept = replace(
            call, q=q, k=k, v=v, heads=len(chosen), decay=of(call.decay), beta=of(call.beta)
        )
        return replace(
            self,
            q=q,
            k=k,
            lse=self.lse[:, chosen],
            kv_heads=tuple(range(len(chosen))),
            recurrence=kept,
        )

    def owned(self) -> Self:
        kept: dict[str, Any] = {
            name: own(x) for name, x in self._call.tensors().items() if name != "v"
        }
        call = replace(self._call, **kept)
        return replace(self, q=call.q, k=call.k, lse=own(self.lse), recurrence=call)

    @property
    def nbytes(self) -> int:
        tensors = [self.lse, *self._call.tensors().values()]
        return sum(x.nbytes for x in (*tensors, *(() if self.ids is None else self.ids)))

    @property
    def _call(self) -> RecurrenceCall:
        assert self.recurrence is not None
        return self.recurrence

    def _weights(self, start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop, device=self.q.device)
        found = weight_rows(self._call.tokens(0, stop), rows)
        return torch.nn.functional.pad(found, (0, self.k_tokens.length - stop))


@dataclass(frozen=True, eq=False)
class KeptNormalized(KeptRows):
    """One call of attention with a normalizer, without its values and its output.

    Attributes:
        whole: Queries, keys and specification of all heads, of which each may need the others.
        chosen: The heads that are seen.
    """

    whole: tuple[Tensor, Tensor, Specification] | None = None
    chosen: tuple[int, ...] = ()

    @classmethod
    @torch.no_grad()
    def of(cls, record: AttentionRecord) -> Self:
        plain = KeptCall.of(replace(record, normalizer=None))
        kept = {name: getattr(plain, name) for name in KeptCall.__dataclass_fields__}
        lse = plain.lse.new_zeros(plain.lse.shape, dtype=accumulation_dtype(plain.q.dtype))
        spec = replace(plain.spec, normalizer=record.normalizer)
        heads = tuple(range(plain.q.shape[1]))
        whole = (plain.q, plain.k, spec)
        return cls(**kept | {"lse": lse}, whole=whole, chosen=heads)._measured()

    def of_heads(self, heads: Sequence[int]) -> Self:
        plain = KeptCall.of_heads(self, heads)
        return replace(plain, chosen=tuple(self.chosen[head] for head in heads))

    def owned(self) -> Self:
        q, k, spec = self._whole
        whole = (own(q), own(k), spec)
        q, k = (whole[0], whole[1]) if self.q is q else (own(self.q), own(self.k))
        return replace(self, q=q, k=k, lse=own(self.lse), whole=whole)

    @property
    def nbytes(self) -> int:
        q, k, _ = self._whole
        parts = {id(x): x.nbytes for x in (q, k, self.q, self.k)}
        return self.lse.nbytes + sum(parts.values()) + sum(x.nbytes for x in self.ids or ())

    @property
    def _whole(self) -> tuple[Tensor, Tensor, Specification]:
        assert self.whole is not None
        return self.whole

    def _weights(self, start: int, stop: int) -> Tensor:
        q, k, spec = self._whole
        normalizer = spec.normalizer
        assert normalizer is not None
        before = min(start, normalizer.queries_before)
        asking = self.q_tokens.slice(start - before, stop)
        part = q[:, :, start - before : stop]
        none = part.new_zeros(part.shape[:3], dtype=self.lse.dtype)
        scores = log_weight_rows(part, k, none, spec, asking, self.k_tokens)
        return normalized(normalizer, scores, asking, self.k_tokens)[:, self.chosen, before:]


def kept_of(record: AttentionRecord) -> KeptCall:
    """The call that a layer of attention has shown; its tensors are not copied."""
    return KeptCall.of(record) if record.normalizer is None else KeptNormalized.of(record)
