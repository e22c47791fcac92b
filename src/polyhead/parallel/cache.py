"""A cache whose tokens lie on the ranks of ``context``: decoding over many processes.

Every rank is given the same new tokens; token p of a sequence is remembered by rank p mod N alone.
A rank attends to what it holds, and the states of all ranks are merged: one exchange of (out, lse)
for each layer, whatever the length. What a rank holds lies in an ordinary cache, of any kind.

Shape letters: B batch, H query heads, G kv heads, T new tokens, N ranks, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.caches.protocol import Counts, KeyValueCache, per_row
from polyhead.functional import run
from polyhead.parallel.ranks import Ranks, unsupported
from polyhead.semantics import KeyValueSource, State, merge_states
from polyhead.semantics.arguments import call_of
from polyhead.semantics.scores import accumulation_dtype
from polyhead.semantics.tokens import Tokens


@dataclass(eq=False)
class HeldByRanks:
    """A key/value source of which each rank holds a part.

    Attributes:
        part: What this rank holds; None: nothing.
        ranks: Those that hold the rest.
        value_dim: V.
        tokens: All tokens held, as far as their number is asked.
    """

    part: KeyValueSource | None
    ranks: Ranks
    value_dim: int
    tokens: Tokens

    def attend(self, q: Tensor, kernel: str, dropout_p: float, **call: Any) -> State:
        """The state of q over all keys, the same on all ranks.

        Raises:
            UnsupportedError: Masks by place or index, dropout and gradients, by name.
        """
        mask, ranks = call["mask"], self.ranks
        for part in () if mask is None else mask.walk():
            if part.compares != "positions":
                raise unsupported(f"mask={part!r} beside a cache that is spread over ranks")
        if dropout_p or (torch.is_grad_enabled() and q.requires_grad):
            raise unsupported("dropout or gradients beside a cache that is spread over ranks")
        precise = accumulation_dtype(q.dtype)
        mine = q.new_zeros(*q.shape[:3], self.value_dim + 1, dtype=precise)
        mine[..., -1] = -torch.inf
        if self.part is not None:
            made = run(
                call_of(
                    q, self.part, None, mask, call["bias"], call["scale"], call["softcap"], None,
                    call["q_positions"], None, None, 0.0, True,
                ),
                kernel,
            )  # fmt: skip
            assert made.lse is not None
            mine[..., :-1], mine[..., -1] = made.out, made.lse
        found = [torch.empty_like(mine) for _ in range(ranks.size)]
        with ranks.watched("an exchange of states"):
            dist.all_gather(found, mine, group=ranks.group)
        out, lse = merge_states([x[..., :-1] for x in found], [x[..., -1] for x in found])
        return State(out.to(q.dtype), lse)


class SpreadCache(KeyValueCache):
    """The cache of one layer, its tokens spread over ranks.

    Args:
        part: An empty cache for what this rank holds.
        ranks: Those of ``context``.
    """

    def __init__(self, part: KeyValueCache, ranks: Ranks) -> None:
        self.part, self.ranks = part, ranks
        self._lengths: list[int] = []
        self._value_dim = 0

    def append(  # type: ignore[override]
        self, k: Tensor, v: Tensor, positions: Tensor | None = None
    ) -> HeldByRanks:
        before = self.length
        places = torch.arange(before, before + k.shape[2], device=k.device)
        if positions is not None and not torch.equal(positions.expand(1, -1)[0], places):
            raise unsupported("rows of different lengths in a cache that is spread over ranks")
        mine = places[places % self.ranks.size == self.ranks.rank]
        if len(mine):
            rows = mine - before
            self.part.append(k[:, :, rows], v[:, :, rows], mine)
        self._lengths = [before + k.shape[2]] * len(k)
        self._value_dim = v.shape[-1]
        return self._all()

    def source(self) -> KeyValueSource:
        if not self.part.lengths:
            raise ValueError("this rank of the cache holds no tokens yet")
        return self.part.source()

    def _all(self) -> HeldByRanks:
        part = self.part.source() if self.part.length else None
        return HeldByRanks(part, self.ranks, self._value_dim, Tokens.of(self.length))

    @property
    def lengths(self) -> list[int]:
        return [*self._lengths]

    @property
    def capacity(self) -> int:
        return self.part.capacity * self.ranks.size

    @property
    def bytes(self) -> int:
        return self.part.bytes

    @property
    def used_bytes(self) -> int:
        return self.part.used_bytes

    @property
    def max_rollback(self) -> int:
        kept = self.part.max_rollback
        return self.length if kept >= self.part.length else kept

    def check_rollback(self, count: Counts) -> list[int]:
        counts = per_row("count", count, len(self._lengths))
        if len(set(counts)) > 1:
            raise unsupported("rows of different lengths in a cache that is spread over ranks")
        if counts and counts[0] > self.length:
            raise ValueError(f"count must be at most the {self.length} tokens held: got {counts}")
        if counts:
            self.part.check_rollback(self._of_part(counts[0]))
        return counts

    def _of_part(self, count: int) -> int:
        """How many of the last so many tokens this rank holds."""
        kept = len(range(self.ranks.rank, self.length - count, self.ranks.size))
        return self.part.length - kept

    def rollback(self, count: Counts) -> None:
        counts = self.check_rollback(count)
        if counts:
            if self.part.lengths:
                self.part.rollback(self._of_part(counts[0]))
            self._lengths = [length - counts[0] for length in self._lengths]

    def fork(self) -> Self:
        other = type(self)(self.part.fork(), self.ranks)
        other._lengths, other._value_dim = [*self._lengths], self._value_dim
        return other

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        chosen = self.check_rows(rows)
        if self.part.lengths:
            self.part.reorder(chosen)
        self._lengths = [self._lengths[row] for row in chosen]

    def reset(self) -> None:
        self.part.reset()
        self._lengths = []

    def description(self) -> dict[str, Any]:
        spread = {"rank": self.ranks.rank, "ranks": self.ranks.size}
        return {**self.part.description(), **spread}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        raise unsupported("saving a cache that is spread over ranks")

    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None:
        raise unsupported("loading a cache that is spread over ranks")
