"""A cache whose tokens lie on the ranks of ``context``: decoding over many processes.

Every rank is given the same new tokens; token p of a sequence is remembered by rank p mod N alone.
A rank attends to what it holds, and the states of all ranks are merged: one exchange of (out, lse)
for each layer, whatever the length. What a rank holds lies in an ordinary cache, of any kind.

Shape letters: B batch, H query heads, G kv heads, T new tokens, N ranks, D key size, V value size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.caches.protocol import Counts, KeyValueCache, per_row
from polyhead.kernels.dispatch import run
from polyhead.parallel.blocks import Job
from polyhead.parallel.order import Spread
from polyhead.parallel.ranks import Ranks, unsupported
from polyhead.semantics import KeyValueSource, Specification, State, merge_states
from polyhead.semantics.arguments import call_of
from polyhead.semantics.scores import accumulation_dtype
from polyhead.semantics.sources import are_first_features
from polyhead.semantics.tokens import Tokens


@dataclass(eq=False)
class HeldByRanks:
    """A key/value source of which each rank holds a part.

    Attributes:
        part: What this rank holds; None: nothing.
        ranks: Those that hold the rest.
        value_dim: Value size V of a head.
        tokens: All tokens held, as far as their number is asked.
        keys: For an encoder's tokens, where those of all ranks stand.
        observer: As of a ``KeyValueSource``; caches that evict are refused before.
    """

    part: KeyValueSource | None
    ranks: Ranks
    value_dim: int
    tokens: Tokens
    keys: Spread | None = None
    observer: None = None

    def attend(self, q: Tensor, kernel: str, dropout_p: float, **call: Any) -> State:
        """The state of q over all keys, the same on all ranks.

        Raises:
            UnsupportedError: Masks by place or index, dropout and gradients, by name.
        """
        mask, ranks = call["mask"], self.ranks
        for part in () if mask is None or self.keys is not None else mask.walk():
            if part.compares != "positions":
                raise unsupported(f"mask={part!r} beside a cache that is spread over ranks")
        if dropout_p or (torch.is_grad_enabled() and q.requires_grad):
            raise unsupported("dropout or gradients beside a cache that is spread over ranks")
        precise = accumulation_dtype(q.dtype)
        mine = q.new_zeros(*q.shape[:3], self.value_dim + 1, dtype=precise)
        mine[..., -1] = -torch.inf
        if self.part is not None:
            of_part = self._of_a_run if self.keys is None else self._of_an_encoder
            made = of_part(q, self.part, kernel, call)
            assert made.lse is not None
            mine[..., :-1], mine[..., -1] = made.out, made.lse
        found = [torch.empty_like(mine) for _ in range(ranks.size)]
        with ranks.watched("an exchange of states"):
            dist.all_gather(found, mine, group=ranks.group)
        out, lse = merge_states([x[..., :-1] for x in found], [x[..., -1] for x in found])
        return State(out.to(q.dtype), lse)

    def _of_a_run(
        self, q: Tensor, part: KeyValueSource, kernel: str, call: Mapping[str, Any]
    ) -> State:
        """The state of q over this rank's tokens, whose positions say what is visible."""
        return run(
            call_of(
                q, part, None, call["mask"], call["bias"], call["scale"], call["softcap"], None,
                call["q_positions"], None, None, 0.0, True,
            ),
            kernel,
        )  # fmt: skip

    def _of_an_encoder(
        self, q: Tensor, part: KeyValueSource, kernel: str, call: Mapping[str, Any]
    ) -> State:
        """The state of q over this rank's slice; masks and biases are those of all tokens."""
        assert self.keys is not None
        k, v = part.gather()
        spec = Specification(
            call["scale"], call["mask"], call["bias"], call["softcap"], None, 0.0, None,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        B, T = q.shape[0], q.shape[2]
        for each in (spec.mask, spec.bias):
            if each is not None:
                each.check(B, q.shape[1], T, self.keys.total)
        job = Job(
            spec, Spread("contiguous", T, 1), self.keys, 0, kernel, self.value_dim, False,
            (B, k.shape[1], k.shape[3]), True,
        )  # fmt: skip
        state = job.empty_state(q)
        job.attend(state, q, k, v, job.columns(self.ranks.rank))
        return state


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
        B, T = len(k), k.shape[2]
        part: KeyValueSource | None = None
        before = torch.tensor(self._lengths if any(self._lengths) else [0] * B, device="cpu")[
            :, None
        ]
        if len(before) != B:
            raise ValueError(f"k must have batch {len(before)}, as the cache: got {B}")
        where = before + torch.arange(T, device="cpu")
        if positions is not None:
            where = positions.detach().cpu().expand(B, T)
        real = where >= 0
        if not torch.equal(where[real], (before + real.cumsum(dim=1) - 1)[real]):
            raise unsupported("positions that leave some out, in a cache spread over ranks")
        mine = real & (where % self.ranks.size == self.ranks.rank)
        most = int(mine.sum(dim=1).max())
        if most:
            # A row's own tokens first; behind those of shorter rows padding, which no cache keeps.
            columns = (~mine).byte().argsort(dim=1, stable=True)[:, :most]
            at = where.masked_fill(~mine, -1).gather(1, columns).to(k.device)
            columns = columns.to(k.device)[:, None, :, None]
            own_k, own_v = (
                x.gather(2, columns.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v)
            )
            if are_first_features(v, k):
                own_v = own_k[..., : v.shape[3]]
            # Of a chunk that a window does not hold whole, its first queries see more than is kept.
            part = self.part.append(own_k, own_v, at[0] if bool((at == at[0]).all()) else at)
        elif self.part.length:
            part = self.part.source()
        self._lengths = (before[:, 0] + real.sum(dim=1)).tolist()
        self._value_dim = v.shape[-1]
        return HeldByRanks(part, self.ranks, self._value_dim, Tokens.of(self.length))

    def source(self) -> KeyValueSource:
        if not self.part.lengths:
            raise ValueError("this rank of the cache holds no tokens yet")
        return self.part.source()

    @property
    def lengths(self) -> list[int]:
        return [*self._lengths]

    @property
    def even(self) -> bool:
        return super().even and self.part.even

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
        whole = kept >= min(self.part.lengths, default=0)
        return min(self._lengths, default=0) if whole else kept

    def check_rollback(self, count: Counts) -> list[int]:
        counts = per_row("rollback count", count, len(self._lengths or [0]))
        for back, length in zip(counts, self._lengths or [0], strict=True):
            if back > length:
                raise ValueError(f"rollback count must be 0 to length={length} tokens: got {back}")
        if self.part.length:
            self.part.check_rollback(self._of_part(counts))
        return counts

    def _of_part(self, counts: Sequence[int]) -> list[int]:
        """How many of the last so many tokens of each row this rank holds."""
        rank, ranks = self.ranks.rank, self.ranks.size
        rows = zip(self.part.lengths, self._lengths, counts, strict=True)
        return [held - len(range(rank, length - back, ranks)) for held, length, back in rows]

    def rollback(self, count: Counts) -> None:
        counts = self.check_rollback(count)
        if self.part.length:
            self.part.rollback(self._of_part(counts))
        self._lengths = [n - back for n, back in zip(self._lengths, counts, strict=False)]

    def fork(self) -> Self:
        other = copy.copy(self)
        other.part, other._lengths = self.part.fork(), [*self._lengths]
        return other

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        chosen = self.check_rows(rows)
        if self.part.length:  # else it may still have the rows of another batch
            self.part.reorder(chosen)
        self._lengths = [self._lengths[row] for row in chosen]

    def reset(self) -> None:
        self.part.reset()
        self._lengths = [0] * len(self._lengths)

    def description(self) -> dict[str, Any]:
        spread = {"rank": self.ranks.rank, "ranks": self.ranks.size}
        return {**self.part.description(), **spread}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        raise unsupported("saving a cache that is spread over ranks")

    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None:
        raise unsupported("loading a cache that is spread over ranks")


class CrossCache(SpreadCache):
    """Keys and values of one cross-attention: of an encoder's tokens each rank has its slice.

    Args:
        part: An empty cache for them.
        ranks: Those of ``context``.
        spreads: Where the tokens of each stack stand, as ``Context`` knows when it is filled.
    """

    def __init__(self, part: KeyValueCache, ranks: Ranks, spreads: Mapping[str, Spread]) -> None:
        super().__init__(part, ranks)
        self._spreads = spreads
        self._keys: Spread | None = None

    def append(  # type: ignore[override]
        self, k: Tensor, v: Tensor, positions: Tensor | None = None
    ) -> HeldByRanks:
        self.part.append(k, v, positions)
        self._keys, self._value_dim = self._spreads["encoder"], v.shape[-1]
        self._lengths = self.part.lengths
        return self.source()

    def source(self) -> HeldByRanks:  # type: ignore[override]
        part = self.part.source()
        return HeldByRanks(part, self.ranks, self._value_dim, part.tokens, self._keys)
