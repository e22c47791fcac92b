"""Attention of a rank's queries to the keys of one rank at a time, forward and backward.

Every pair of runs is an ordinary call: its tokens know their positions and places, so every mask,
bias and kernel serves. States of different keys merge (``semantics/state.py``):

    lse = log Σ exp(lse_i)        out = Σ w_i out_i        w_i = exp(lse_i − lse)

Backward, a block is computed once more and handed its share of the merged result's gradient, so
that nothing of it was kept:

    dout_i = w_i dout             dlse_i = w_i (dout · (out_i − out) + dlse)

Shape letters: B batch, H query heads, G kv heads, T queries and S keys of a rank, D key size,
V value size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.functional import run
from polyhead.parallel.order import Held, Spread
from polyhead.semantics import Call, DenseSource, Specification, State, merge_states
from polyhead.semantics.call import decisive
from polyhead.semantics.masks import Visibility
from polyhead.semantics.scores import accumulation_dtype


class Saved(NamedTuple):
    """What the backward pass of a rank's queries needs: the merged result and its gradients."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor


@dataclass(eq=False)
class Job:
    """One attention over ranks, as a rank sees it.

    Attributes:
        spec: The meaning, without sinks: they join when all keys were seen.
        queries: Where the queries of all ranks stand.
        keys: Where the keys of all ranks stand.
        rank: This one.
        kernel: ``"auto"`` or a kernel's name.
        value_dim: V.
        latent: Whether a value is the first V features of its key: keys alone are sent.
        shape: B, G, D of the keys.
        needs_lse: Whether anybody reads the lse of the result.
    """

    spec: Specification
    queries: Spread
    keys: Spread
    rank: int
    kernel: str
    value_dim: int
    latent: bool
    shape: tuple[int, int, int]
    needs_lse: bool

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors of the bias."""
        return () if self.spec.bias is None else self.spec.bias.tensors

    def elements(self, rank: int) -> int:
        """Numbers of the keys and values that ``rank`` holds."""
        B, G, D = self.shape
        return B * G * self.keys.length(rank) * (D + (0 if self.latent else self.value_dim))

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values as one flat message."""
        return k.reshape(-1) if self.latent else torch.cat((k.reshape(-1), v.reshape(-1)))

    def unpacked(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys ``[B, G, S, D]`` and values ``[B, G, S, V]`` of the message of ``rank``, views."""
        return self.parts(message, self.keys.length(rank))

    def parts(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """As ``unpacked``, of so many keys."""
        B, G, D = self.shape
        count = B * G * length * D
        k = message[:count].view(B, G, length, D)
        if self.latent:
            return k, k[..., : self.value_dim]
        return k, message[count:].view(B, G, length, self.value_dim)

    def empty_state(self, q: Tensor) -> State:
        """The state of queries that saw nothing, in the precision of sums."""
        precise = accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], self.value_dim, dtype=precise)
        return State(out, q.new_full(q.shape[:3], -torch.inf, dtype=precise))

    def attend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, columns: Iterable[Held]
    ) -> State:
        """The state when these keys were seen too."""
        if state.lse is None:
            raise ValueError("a state over ranks needs its lse")
        out, lse = state.out, state.lse
        for rows, part, call in self._calls(q, k, v, columns, self.spec):
            made = run(call, self.kernel)
            if made.lse is None:
                raise RuntimeError("the kernel returned no lse although it was asked for one")
            del part
            out[:, :, rows], lse[:, :, rows] = merge_states(
                [out[:, :, rows], made.out], [lse[:, :, rows], made.lse]
            )
        return State(out, lse)

    def add_gradients(
        self,
        saved: Saved,
        k: Tensor,
        v: Tensor,
        columns: Iterable[Held],
        grad_q: Tensor,
        grad_learned: Sequence[Tensor],
    ) -> Tensor:
        """Adds to the gradients of the queries and the bias; returns that of the packed keys."""
        grad = torch.zeros(
            self.packed(k, v).shape, dtype=accumulation_dtype(k.dtype), device=k.device
        )
        grad_k, grad_v = self.parts(grad, k.shape[2])
        columns = list(columns)
        with torch.enable_grad():
            q_leaf, k_leaf = saved.q.detach().requires_grad_(), k.detach().requires_grad_()
            v_leaf = k_leaf[..., : self.value_dim] if self.latent else v.detach().requires_grad_()
            learned = [x.detach().requires_grad_() for x in self.learned]
            spec = self.spec
            if spec.bias is not None:
                spec = replace(spec, bias=spec.bias.with_tensors(learned))
        leaves = [q_leaf, k_leaf, *([] if self.latent else [v_leaf]), *learned]
        sums = [grad_q, grad_k, *([] if self.latent else [grad_v]), *grad_learned]
        calls = self._calls(q_leaf, k_leaf, v_leaf, columns, spec)
        while True:
            with torch.enable_grad():
                found = next(calls, None)
                if found is None:
                    return grad
                rows, _, call = found
                made = run(call, self.kernel)
            if made.lse is None:
                raise RuntimeError("the kernel returned no lse although it was asked for one")
            of_state = _share(saved, rows, made.out.detach(), made.lse.detach())
            pieces = torch.autograd.grad((made.out, made.lse), leaves, of_state, allow_unused=True)
            for total, piece in zip(sums, pieces, strict=True):
                if piece is not None:
                    total += piece

    def _calls(
        self, q: Tensor, k: Tensor, v: Tensor, columns: Iterable[Held], spec: Specification
    ) -> Iterator[tuple[slice, slice, Call]]:
        """A call for each pair of runs of which anything is visible."""
        for keys in columns:
            source = DenseSource.over(k[:, :, keys.rows], v[:, :, keys.rows], keys.tokens)
            for queries in self.queries.held(self.rank):
                mask, bias = spec.mask, spec.bias
                if mask is not None:
                    mask = mask.of_tokens(queries.run.whole, keys.run.whole)
                mask, visibility = decisive(mask, queries.tokens, keys.tokens)
                if visibility is Visibility.NONE:
                    continue
                if bias is not None:
                    bias = bias.of_tokens(queries.run.whole, keys.run.whole)
                rows = q[:, :, queries.rows]
                part = replace(spec, mask=mask, bias=bias)
                wanted = torch.is_grad_enabled()
                call = Call(rows, source, part, queries.tokens, True, visibility, wanted)
                yield queries.rows, keys.rows, call


def _share(saved: Saved, rows: slice, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a block's own ``out`` and ``lse``."""
    precise = accumulation_dtype(out.dtype)
    merged, merged_lse = saved.out[:, :, rows].to(precise), saved.lse[:, :, rows]
    grad_out, grad_lse = saved.grad_out[:, :, rows].to(precise), saved.grad_lse[:, :, rows]
    # A row that saw nothing, or content that is not finite, takes and gives nothing.
    silent = merged_lse.isneginf() | lse.isneginf() | merged.isnan().any(dim=-1)
    weight = torch.exp(lse - merged_lse).masked_fill(silent, 0.0)
    apart = (out.to(precise) - merged).masked_fill(silent[..., None], 0.0)
    grad_out = grad_out.masked_fill(silent[..., None], 0.0)
    of_lse = weight * ((grad_out * apart).sum(dim=-1) + grad_lse.masked_fill(silent, 0.0))
    return (weight[..., None] * grad_out).to(out.dtype), of_lse.to(lse.dtype)
