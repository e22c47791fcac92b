"""The recurrence by matrix products over chunks of up to 64 tokens, in PyTorch, differentiable.

Within a chunk, with G the sums of its log decays and S the state before it:

    u_i = β_i (v_i − Σ_{j<i} (k_i ∘ exp(G_i − G_j))ᵀ k_j u_j − (k_i ∘ exp G_i)ᵀ S)
    o_i = Σ_{j≤i} (q_i ∘ exp(G_i − G_j))ᵀ k_j u_j + (q_i ∘ exp G_i)ᵀ S
    S'  = exp(G_C) S + Σ_j (k_j ∘ exp(G_C − G_j)) u_jᵀ

Without delta u = β v (Dao & Gu 2024, section 6). With it the first line is a triangular system for
all u of a chunk, the UT transform (Yang et al. 2024, arXiv 2406.06484, section 3.2): solved once
for β v and once for what S is multiplied with.

No decay overflows: only differences G_i − G_j ≤ 0 go into exp. They are taken in float64, since the
sums of strong decays lose what tells weak ones apart. A decay for each key feature is no factor of
a matrix of C × C; there a chunk is halved again and again, and where a row of the later half meets
one of the earlier half, both decay to the middle (GLA's secondary chunks, arXiv 2312.06635, section
4.3, have several such places).

Shape letters: B batch, H heads, N chunks, C tokens of a chunk, K key size, V value size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from polyhead.kernels.base import Refusal
from polyhead.kernels.recurrence.base import RecurrenceKernel
from polyhead.semantics.recurrence_call import RecurrenceCall, with_heads

CHUNK = 64
_TOKENS = 8 * CHUNK
"""Tokens whose numbers are held at a time, where no gradient keeps all of them."""
_SMALLEST = 8
"""Tokens whose decays by feature are taken pair by pair."""
_NOTHING = -1000.0
"""A log decay that leaves nothing, in float64 too; sums of −∞ would have no differences."""


class ChunkedKernel(RecurrenceKernel):
    name = "chunked"
    summary = "PyTorch, matrix products over chunks of up to 64 tokens, forward and backward"

    def plan(self, call: RecurrenceCall) -> Refusal | None:
        if call.q.device.type == "mps":
            return Refusal(f"tensors on {call.q.device} (it has no float64)")
        return None

    def run(self, call: RecurrenceCall) -> tuple[Tensor, Tensor]:
        T = call.q.shape[2]
        size = min(CHUNK, 1 << max(T - 1, 0).bit_length())
        if call.delta:  # a chunk of more tokens than key features loses digits
            size = min(size, max(_SMALLEST, 1 << (call.q.shape[3] - 1).bit_length()))
        if T <= _TOKENS or call.requires_grad:
            return self._computed(call, size)
        outs = []
        for start in range(0, T, _TOKENS):
            out, state = self._computed(call.tokens(start, start + _TOKENS), size)
            call = replace(call, state=state)
            outs.append(out)
        return torch.cat(outs, dim=2), state

    def _computed(self, call: RecurrenceCall, size: int) -> tuple[Tensor, Tensor]:
        """``run`` in chunks of ``size`` tokens, the numbers of all of them at a time."""
        H, T = call.heads, call.q.shape[2]
        by_feature = call.decay is not None and call.decay.ndim == 4
        shared = call.q.shape[1]
        if by_feature or call.k.shape[1] != shared:
            shared = H
        q, k, v, decay, beta = call.precise(heads=shared)
        q, k, v = (_in_chunks(x, size) for x in (q, k, v))
        sums = None
        if decay is not None:
            sums = _in_chunks(decay, size).double().clamp(min=_NOTHING).cumsum(dim=-2)

        weights = _pairs(q, k, sums, H)
        if beta is not None:
            beta = _in_chunks(beta[..., None], size)
            v = beta * v
        if call.delta:
            system, answered = _pairs(k, k, sums, H), _decayed(with_heads(k, H), sums)
            if beta is not None:
                system, answered = beta * system, beta * answered
            both = torch.linalg.solve_triangular(
                system, torch.cat([v, answered], dim=-1), upper=False, unitriangular=True
            )
            v, answered = both.split([v.shape[-1], answered.shape[-1]], dim=-1)
        # What the state before a chunk is read by, what is written to the one behind it, and what
        # is left of it.
        q, k = _decayed(with_heads(q, H), sums), with_heads(k, H)
        kept = None
        if sums is not None:
            last = sums[..., -1:, :]
            k = _decayed(k, last - sums)
            kept = last.to(call.dtype).exp().mT

        state, outs = call.first_state(), []
        for n in range(q.shape[2]):
            u = v[:, :, n]
            if call.delta:
                u = u - answered[:, :, n] @ state
            outs.append(q[:, :, n] @ state + weights[:, :, n] @ u)
            if kept is not None:
                state = kept[:, :, n] * state
            state = state + k[:, :, n].mT @ u
        out = torch.cat(outs, dim=2)[:, :, :T] if outs else v.flatten(2, 3)
        return call.rounded(out), state


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """``[…, T, D]`` as ``[…, N, C, D]``; zeros behind the last token change nothing."""
    return _split(F.pad(x, (0, 0, 0, -x.shape[2] % size)), size)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """``[…, T, D]`` as ``[…, T / sizes, *sizes, D]``."""
    parts = x.shape[-2] // math.prod(sizes)
    return x.reshape(*x.shape[:-2], parts, *sizes, x.shape[-1])


def _decayed(x: Tensor, logs: Tensor | None) -> Tensor:
    return x if logs is None else x * logs.to(x.dtype).exp()


def _pairs(a: Tensor, b: Tensor, sums: Tensor | None, heads: int) -> Tensor:
    """``[B, H, N, C, C]``: (a_i ∘ exp(G_i − G_j))ᵀ b_j for j ≤ i, else 0."""
    if sums is not None and sums.shape[-1] > 1:
        return _pairs_by_feature(a, b, sums)
    products = with_heads(a @ b.mT, heads)
    if sums is None:
        return products.tril()
    return products * _pair_decays(sums, a.dtype)[..., 0]


def _pair_decays(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """``[…, C, C, K]``: exp(G_i − G_j) for j ≤ i, else 0."""
    C = sums.shape[-2]
    ahead = torch.ones(C, C, dtype=torch.bool, device=sums.device).triu(1)[..., None]
    logs = sums[..., :, None, :] - sums[..., None, :, :]
    return logs.to(dtype).masked_fill(ahead, -torch.inf).exp()


def _pairs_by_feature(a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """``_pairs`` for ``[…, C, K]`` of each: C · log C · K numbers in place of C² · K."""
    C = a.shape[-2]
    size = min(C, _SMALLEST)
    a_s, b_s, sums_s = (_split(x, size) for x in (a, b, sums))
    decays = _pair_decays(sums_s, a.dtype)
    found = (a_s[..., :, None, :] * b_s[..., None, :, :] * decays).sum(dim=-1)
    while size < C:
        a_s, b_s, sums_s = (_split(x, 2, size) for x in (a, b, sums))
        early, late = sums_s.unbind(dim=-3)
        middle = early[..., -1:, :]
        left = _decayed(a_s[..., 1, :, :], late - middle)
        right = _decayed(b_s[..., 0, :, :], middle - early)
        of_early, of_late = found[..., ::2, :, :], found[..., 1::2, :, :]
        upper, lower = F.pad(of_early, (0, size)), torch.cat([left @ right.mT, of_late], dim=-1)
        found = torch.cat([upper, lower], dim=-2)
        size *= 2
    return found[..., 0, :, :]
