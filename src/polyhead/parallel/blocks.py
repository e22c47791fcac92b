"""Attention of a rank's queries to the keys of one rank at a time, forward and backward.

Every pair of pieces of runs is an ordinary call: its tokens know their positions and places, so
every mask, bias and kernel serves. States of different keys merge in place, in float32 (float64 of
float64), and are rounded once, when all keys were seen (``semantics/state.py``):

    lse = log Σ exp(lse_i)        out = Σ w_i out_i        w_i = exp(lse_i − lse)

The backward pass of a block gets the merged result: with its lse the weights of a block are those
of the whole, so nothing of a block is kept (``Kernel.gradients``). A kernel without a backward pass
of its own computes the block once more and gets its share of the gradient:

    dout_i = w_i dout             dlse_i = w_i (dout · (out_i − out) + dlse)

Besides what a rank keeps there are the results of one piece at a time, and one block of keys with
its gradient.

Shape letters: B batch, H query heads, G kv heads, T queries and S keys of a rank, D key size,
V value size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.kernels.dispatch import gradients, run
from polyhead.parallel.latents import Expansion
from polyhead.parallel.order import LocalSpan, Spread
from polyhead.semantics import Call, DenseSource, Specification, State
from polyhead.semantics.call import simplify_mask
from polyhead.semantics.masks import Visibility
from polyhead.semantics.scores import accumulation_dtype

PIECE = 2048
"""Most queries, and most keys, of a call: what it makes is small beside what a rank keeps."""


class Saved(NamedTuple):
    """What the backward pass of a rank's queries needs: the merged result and its gradients."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor

    def of(self, rows: slice) -> Saved:
        """The same for some queries, in the precision of sums."""
        precise = accumulation_dtype(self.q.dtype)
        return Saved(*(x[:, :, rows].to(precise) for x in self))


@dataclass(eq=False)
class Job:
    """One attention over ranks, as a rank sees it.

    Attributes:
        spec: The attention specification, without sinks: they join when all keys were seen.
        queries: Where the queries of all ranks stand.
        keys: Where the keys of all ranks stand.
        rank: Rank of this process.
        kernel: ``"auto"`` or a kernel's name.
        value_dim: Value size V of a head.
        latent: Whether a value is the first V features of its key, or made from it: keys alone
            are sent.
        shape: B, G, D of the keys that are sent.
        needs_lse: Whether anybody reads the lse of the result.
        expansion: Makes keys and values of the latents that are sent, or None.
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
    expansion: Expansion | None = None

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Tensors besides q, k and v that may need a gradient: of the bias and of an expansion."""
        of_bias = () if self.spec.bias is None else self.spec.bias.tensors
        return of_bias if self.expansion is None else (*of_bias, self.expansion.weight)

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
        """The same as ``unpacked``, for this number of keys."""
        B, G, D = self.shape
        count = B * G * length * D
        k = message[:count].view(B, G, length, D)
        if self.latent:
            return k, k[..., : self.value_dim]
        return k, message[count:].view(B, G, length, self.value_dim)

    def columns(self, owner: int | None) -> Iterator[LocalSpan]:
        """Keys of a rank, or of all in the order of the sequence, in pieces."""
        return self.keys.all_held(PIECE) if owner is None else self.keys.held(owner, PIECE)

    def empty_state(self, q: Tensor) -> State:
        """The state of queries that have seen nothing, in the precision of sums."""
        precise = accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], self.value_dim, dtype=precise)
        return State(out, q.new_full(q.shape[:3], -torch.inf, dtype=precise))

    def attend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, columns: Iterable[LocalSpan]
    ) -> None:
        """Merges the state of these keys, in place."""
        if state.lse is None:
            raise ValueError("a state over ranks needs its lse")
        for keys in columns:
            source = None
            for queries, spec, visibility in self._seen(keys):
                source = self._read(k, v, keys) if source is None else source
                rows = q[:, :, queries.rows].to(state.out.dtype)
                call = Call(rows, source, spec, queries.tokens, True, visibility, False)
                made = run(call, self.kernel)
                _merge(state.out[:, :, queries.rows], state.lse[:, :, queries.rows], made)

    def add_gradients(
        self,
        saved: Saved,
        k: Tensor,
        v: Tensor,
        columns: Iterable[LocalSpan],
        grad_q: Tensor,
        grad_learned: Sequence[Tensor] | None,
    ) -> Tensor:
        """Adds to the gradients of the queries and, unless None, of what is learned.

        Returns:
            The gradient of the packed keys, in the precision of sums.
        """
        count = k.numel() + (0 if self.latent else v.numel())
        grad = k.new_zeros(count, dtype=accumulation_dtype(k.dtype))
        grad_k, grad_v = self.parts(grad, k.shape[2])
        for keys in columns:
            source = None
            sums = [grad_k[:, :, keys.rows], grad_v[:, :, keys.rows]]
            for queries, spec, visibility in self._seen(keys):
                if source is None:
                    source = self._read(k, v, keys)
                    if self.expansion is not None:
                        sums = [torch.zeros_like(source.k), torch.zeros_like(source.v)]
                of_bias = self._sums_of_bias(grad_learned, queries, keys)
                part = saved.of(queries.rows)
                call = Call(part.q, source, spec, queries.tokens, True, visibility, True)
                found = _gradients(call, part, bool(of_bias), self.kernel)
                totals = grad_q[:, :, queries.rows], *sums, *of_bias
                for total, piece in zip(totals, found, strict=True):
                    if piece is not None:
                        total += piece
            if source is not None and self.expansion is not None:
                of_weight = None if grad_learned is None else grad_learned[-1]
                latent = k[:, :, keys.rows].to(grad.dtype)
                self.expansion.pull_back(latent, sums, grad_k[:, :, keys.rows], of_weight)
        return grad

    def _seen(self, keys: LocalSpan) -> Iterator[tuple[LocalSpan, Specification, Visibility]]:
        """The pieces of queries that see any of these keys, and the meaning of each pair."""
        mask, bias = self.spec.mask, self.spec.bias
        for queries in self.queries.held(self.rank, PIECE):
            here = queries.run.whole, keys.run.whole
            its = None if mask is None else mask.of_tokens(*here)
            its, visibility = simplify_mask(its, queries.tokens, keys.tokens)
            if visibility is not Visibility.NONE:
                cut = None if bias is None else bias.of_tokens(*here)
                yield queries, replace(self.spec, mask=its, bias=cut), visibility

    def _read(self, k: Tensor, v: Tensor, keys: LocalSpan) -> DenseSource:
        """Keys and values of a piece, in the precision of sums."""
        precise = accumulation_dtype(k.dtype)
        k = k[:, :, keys.rows].to(precise)
        if self.expansion is not None:
            k, v = self.expansion(k)
        elif self.latent:
            v = k[..., : self.value_dim]
        else:
            v = v[:, :, keys.rows].to(precise)
        return DenseSource.over(k, v, keys.tokens)

    def _sums_of_bias(
        self, grad_learned: Sequence[Tensor] | None, queries: LocalSpan, keys: LocalSpan
    ) -> tuple[Tensor, ...]:
        """Where the gradients of the bias of a pair of pieces belong, views."""
        if grad_learned is None or self.spec.bias is None:
            return ()
        whole = self.spec.bias.with_tensors(grad_learned[: len(self.spec.bias.tensors)])
        return whole.of_tokens(queries.run.whole, keys.run.whole).tensors


def _merge(out: Tensor, lse: Tensor, made: State) -> None:
    """Adds a state of other keys to one that is kept, in place."""
    if made.lse is None:
        raise RuntimeError("the kernel returned no lse although it was asked for one")
    both = torch.logaddexp(lse, made.lse)
    # exp(−∞ − −∞) is NaN: a row that saw nothing anywhere is measured against 0 instead.
    safe = both.masked_fill(both.isneginf(), 0.0)
    out.mul_(torch.exp(lse - safe)[..., None])
    out.addcmul_(made.out, torch.exp(made.lse - safe)[..., None])
    lse.copy_(both)


def _gradients(call: Call, part: Saved, of_bias: bool, kernel: str) -> Sequence[Tensor | None]:
    """Gradients of q, k and v of a call and, if asked for, of its bias."""
    bias = call.spec.bias
    learned: list[Tensor] = []
    if of_bias and bias is not None:
        with torch.enable_grad():
            learned = [x.detach().to(part.q.dtype).requires_grad_() for x in bias.tensors]
            call = replace(call, spec=replace(call.spec, bias=bias.with_tensors(learned)))
    given = part.grad_out, part.grad_lse
    found = gradients(call, State(part.out, part.lse), given, kernel)
    return _again(call, part, learned, kernel) if found is None else found


def _again(
    call: Call, part: Saved, learned: Sequence[Tensor], kernel: str
) -> Sequence[Tensor | None]:
    """The same as ``_gradients``, by autograd of the call."""
    source = call.source
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (call.q, *source.gather()))
        made = run(replace(call, q=q, source=DenseSource.over(k, v, source.tokens)), kernel)
    if made.lse is None:
        raise RuntimeError("the kernel returned no lse although it was asked for one")
    of_state = _share(part, made.out.detach(), made.lse.detach())
    return torch.autograd.grad(
        (made.out, made.lse), (q, k, v, *learned), of_state, allow_unused=True
    )


def _share(saved: Saved, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a block's own ``out`` and ``lse``."""
    _, merged, merged_lse, grad_out, grad_lse = saved
    # A row that saw nothing, or content that is not finite, has no gradients.
    no_grad_rows = merged_lse.isneginf() | lse.isneginf() | merged.isnan().any(dim=-1)
    weight = torch.exp(lse - merged_lse).masked_fill(no_grad_rows, 0.0)
    apart = (out - merged).masked_fill(no_grad_rows[..., None], 0.0)
    grad_out = grad_out.masked_fill(no_grad_rows[..., None], 0.0)
    of_lse = weight * ((grad_out * apart).sum(dim=-1) + grad_lse.masked_fill(no_grad_rows, 0.0))
    return weight[..., None] * grad_out, of_lse
