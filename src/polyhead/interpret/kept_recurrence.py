"""What is kept of one call of heads that remember a state: the recurrence, from which rows follow.

    o_t = Σ_s w_ts v_s        share_ts = |w_ts| / Σ_j |w_tj|

The weights w are signed and add up to anything (``polyhead.recurrence_rows``). Shares stand where
attention has its weights, and lse_t = log Σ_j |w_tj|: pictures, statistics and rows are theirs.

Letters: B batch, H heads (states), T tokens, R rows, K key size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from polyhead.interpret.kept import KeptCall, own
from polyhead.semantics import Causal, Specification, Tokens
from polyhead.semantics.recurrence import weight_rows
from polyhead.semantics.recurrence_call import RecurrenceCall, with_heads
from polyhead.semantics.scores import full_precision

_ROWS = 512
"""Rows whose weights are computed together, in all heads."""

_blocks: WeakKeyDictionary[KeptRecurrence, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()
"""The block of rows that was computed last, of any call: heads are asked for one after another."""


@dataclass(frozen=True, eq=False)
class KeptRecurrence(KeptCall):
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
        made = cls(
            q=q,
            k=k,
            lse=q.new_zeros(q.shape[:3], dtype=call.dtype),
            spec=Specification(call.scale, Causal()),
            q_tokens=Tokens.of(T),
            k_tokens=Tokens.of(T),
            kv_heads=tuple(range(H)),
            recurrence=replace(call, q=q, k=k, v=none, decay=decay, beta=beta),
        )
        for first in range(0, T, _ROWS):
            weights = made.signed(first, min(first + _ROWS, T))
            made.lse[:, :, first : first + _ROWS] = weights.abs().sum(dim=-1).log()
        return made

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

    @torch.no_grad()
    def signed(self, start: int, stop: int) -> Tensor:
        """``[B, H, R, T]`` the weights of rows ``start`` to ``stop − 1``, with their signs."""
        last = _blocks.get(self)
        if last is not None and last[0] == (start, stop):
            return last[1]
        rows = torch.arange(start, stop, device=self.q.device)
        with full_precision(self.q):
            found = weight_rows(self._call.tokens(0, stop), rows)
        found = torch.nn.functional.pad(found, (0, self.k_tokens.length - stop))
        _blocks.clear()
        _blocks[self] = (start, stop), found
        return found

    def row(self, query: int) -> Tensor:
        lse = self.lse[:, :, query, None]
        shares = self._of(query, query + 1)[:, :, 0].abs() * (-lse).exp()
        return shares.masked_fill(lse.isneginf(), 0.0)

    def log_weights(self, head: int, rows: Tokens, keys: Tokens) -> Tensor:
        start, stop = rows.start, rows.start + rows.length
        weights = self._of(start, stop)[
            :, head : head + 1, :, keys.start : keys.start + keys.length
        ]
        lse = self.lse[:, head : head + 1, start:stop, None]
        return (weights.abs().log() - lse).masked_fill(lse.isneginf(), -torch.inf)

    def _of(self, start: int, stop: int) -> Tensor:
        """``signed``, of a block of rows that is made once for all heads where it holds them."""
        first = start // _ROWS * _ROWS
        last = min(first + _ROWS, self.q_tokens.length)
        if stop <= last:
            return self.signed(first, last)[:, :, start - first : stop - first]
        return self.signed(start, stop)
