"""How keys and values get to the queries of other ranks.

    ring     blocks go round, one step at a time; the next travels while this one is computed
    gather   every rank gets all keys at once
    heads    ranks trade tokens for heads, and each computes some heads of the whole sequence

``ring`` (Liu et al. 2023) and ``gather`` keep q, k, v, out and lse of their own tokens for the
backward pass and fetch keys once more; ``heads`` is Ulysses (Jacobs et al. 2023). Kv heads are
never expanded: a rank is sent each kv head that its query heads read, once.

Shape letters: B batch, H query heads, G kv heads, N ranks, T, S tokens, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhead.kernels.dispatch import run
from polyhead.parallel.blocks import Job, Saved
from polyhead.parallel.collectives import all_to_all
from polyhead.parallel.ranks import Ranks, unsupported
from polyhead.semantics import Call, DenseSource, State
from polyhead.semantics.call import simplify_mask
from polyhead.semantics.scores import accumulation_dtype

Exchange = Literal["ring", "gather", "heads"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


def exchanged(exchange: Exchange, ranks: Ranks, job: Job, q: Tensor, k: Tensor, v: Tensor) -> State:
    """The state of this rank's queries over the keys of all ranks; differentiable."""
    if exchange == "heads":
        return _by_heads(ranks, job, q, k, v)
    way = _ring if exchange == "ring" else _gathered
    given = (q, k) if job.latent else (q, k, v)
    out, lse = _Exchanged.apply(way, ranks, job, *given, *job.learned)  # type: ignore[no-untyped-call]
    return State(out, lse)


class _Exchanged(torch.autograd.Function):
    """Attention over ranks with a backward pass that fetches keys once more."""

    @staticmethod
    def forward(
        ctx: Any, way: Callable[..., Any], ranks: Ranks, job: Job, q: Tensor, k: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        v = k[..., : job.value_dim] if job.latent else rest[0]
        state = job.empty_state(q)

        def attend(keys: Tensor, values: Tensor, owner: int | None) -> None:
            job.attend(state, q, keys, values, job.columns(owner))

        with ranks.watched("an exchange of keys"):
            way(ranks, job, job.packed(k, v), attend)
        assert state.lse is not None
        ctx.way, ctx.ranks, ctx.job = way, ranks, job
        out = state.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out, state.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        q, k, v, out, lse = ctx.saved_tensors
        precise = accumulation_dtype(q.dtype)
        saved = Saved(q, out, lse, *grads)
        grad_q = torch.zeros_like(q, dtype=precise)
        first = 5 if job.latent else 6
        grad_learned = None
        if any(ctx.needs_input_grad[first:]):
            grad_learned = [torch.zeros_like(x, dtype=precise) for x in job.learned]

        def attend(keys: Tensor, values: Tensor, owner: int | None) -> Tensor:
            columns = job.columns(owner)
            return job.add_gradients(saved, keys, values, columns, grad_q, grad_learned)

        with ctx.ranks.watched("an exchange of gradients"):
            grad = ctx.way(ctx.ranks, job, job.packed(k, v), attend)
        grad_k, grad_v = job.parts(grad, k.shape[2])
        of_values = [] if job.latent else [grad_v.to(v.dtype)]
        of_learned: list[Tensor | None] = [None] * len(job.learned)
        if grad_learned is not None:
            of_learned = [g.to(x.dtype) for g, x in zip(grad_learned, job.learned, strict=True)]
        return None, None, None, grad_q.to(q.dtype), grad_k.to(k.dtype), *of_values, *of_learned


class _Message:
    """One step of the ring, under way: to the next rank, from the one before."""

    def __init__(self, ranks: Ranks, sent: Tensor, expected: int) -> None:
        self._kept: Tensor | None = sent.contiguous()
        self._received = torch.empty(expected, dtype=sent.dtype, device=sent.device)
        following, before = (ranks.global_rank(ranks.rank + step) for step in (1, -1))
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._kept, following, ranks.group),
                dist.P2POp(dist.irecv, self._received, before, ranks.group),
            ]
        )

    def wait(self) -> Tensor:
        """Returns the received block; the memory of the sent one is released."""
        for work in self._work:
            work.wait()
        self._work, self._kept = [], None
        return self._received


def _ring(
    ranks: Ranks,
    job: Job,
    held: Tensor,
    attend: Callable[[Tensor, Tensor, int], Tensor | None],
) -> Tensor | None:
    """Every block visits each rank once; gradients travel with their block and end at its owner.

    A rank holds two blocks of keys, and behind them the gradient of one block and two on their way.
    """
    N, coming, grad = ranks.size, None, None
    for step in range(N):
        owner = (ranks.rank - step) % N
        following = None
        if step + 1 < N:
            following = _Message(ranks, held, job.elements((owner - 1) % N))
        grad = attend(*job.unpacked(held, owner), owner)
        if following is not None:
            held = following.wait()
        if grad is None:
            continue
        if coming is not None:
            grad += coming.wait()
            coming = None
        if N > 1:
            coming = _Message(ranks, grad, job.elements((owner - 1) % N))
            grad = None
    return grad if coming is None else coming.wait()


def _gathered(
    ranks: Ranks,
    job: Job,
    held: Tensor,
    attend: Callable[[Tensor, Tensor, None], Tensor | None],
) -> Tensor | None:
    """All keys in the order of the sequence; their gradients are summed where they came from."""
    N, keys = ranks.size, job.keys
    most = max(job.elements(rank) for rank in range(N))
    mine = held.new_zeros(most)
    mine[: held.numel()] = held
    blocks = [torch.empty_like(mine) for _ in range(N)]
    dist.all_gather(blocks, mine, group=ranks.group)
    pairs = [job.unpacked(block[: job.elements(rank)], rank) for rank, block in enumerate(blocks)]
    k = keys.joined([pair[0] for pair in pairs], 2)
    v = k if job.latent else keys.joined([pair[1] for pair in pairs], 2)
    del blocks, pairs  # copied: all keys are held once
    found = attend(k, v, None)
    if found is None:
        return None
    parts = job.parts(found, keys.total)
    sent = found.new_zeros(N, most)
    for rank in range(N):
        its = job.packed(*(keys.taken(part, rank, 2) for part in parts))
        sent[rank, : its.numel()] = its
    del found, parts
    grad = sent.new_empty(most)
    dist.reduce_scatter(grad, list(sent), group=ranks.group)
    return grad[: held.numel()]


def head_shares(H: int, G: int, ranks: int) -> list[tuple[range, range]]:
    """The query heads and the kv heads of each rank.

    Raises:
        UnsupportedError: Heads that ranks cannot share evenly.
    """
    if H % ranks or (G % ranks and ranks % G):
        raise unsupported(
            f"H = {H} query heads and G = {G} kv heads on {ranks} ranks: H must be a multiple of "
            "the ranks, and G a multiple or a divisor of them"
        )
    each, held = H // ranks, max(1, G // ranks)
    return [
        (
            range(rank * each, (rank + 1) * each),
            range(rank * G // ranks, rank * G // ranks + held),
        )
        for rank in range(ranks)
    ]


def _by_heads(ranks: Ranks, job: Job, q: Tensor, k: Tensor, v: Tensor) -> State:
    """Some heads of all tokens on every rank, by ordinary attention."""
    B, H = q.shape[:2]
    shares = head_shares(H, k.shape[1], ranks.size)
    mine, _ = shares[ranks.rank]
    spread = [(q, job.queries), (k, job.keys), *([] if job.latent else [(v, job.keys)])]
    sent = [
        [x[:, kv.start : kv.stop] if i else x[:, heads.start : heads.stop]
         for i, (x, _) in enumerate(spread)]
        for heads, kv in shares
    ]  # fmt: skip
    shapes = [
        [(*part.shape[:2], where.length(rank), part.shape[-1])
         for part, (_, where) in zip(sent[ranks.rank], spread, strict=True)]
        for rank in range(ranks.size)
    ]  # fmt: skip
    received = _traded(ranks, sent, shapes)
    whole = [
        where.joined([parts[i] for parts in received], 2) for i, (_, where) in enumerate(spread)
    ]
    keys = whole[1]
    if job.expansion is not None:
        keys, values = job.expansion.of_heads(mine)(keys)
    else:
        values = keys[..., : job.value_dim] if job.latent else whole[2]
    state = _some_heads(job, whole[0], keys, values, mine, H)
    assert state.lse is not None
    sent_back = [state.out, *([state.lse[..., None]] if job.needs_lse else [])]
    found = [
        _returned(ranks, job, x, (B, len(mine), job.queries.length(ranks.rank), x.shape[-1]))
        for x in sent_back
    ]
    return State(found[0], found[1][..., 0] if job.needs_lse else None)


def _returned(ranks: Ranks, job: Job, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """All heads of this rank's queries, of what every rank made of its heads."""
    sent = [[job.queries.taken(x, rank, 2)] for rank in range(ranks.size)]
    return torch.cat([part for (part,) in _traded(ranks, sent, [[shape]] * ranks.size)], dim=1)


def _some_heads(job: Job, q: Tensor, k: Tensor, v: Tensor, heads: range, of: int) -> State:
    """Attention of all tokens for some heads."""
    first, count = job.spec.heads or (0, of)
    spec = replace(job.spec.of_heads(heads), heads=(first + heads.start, count))
    rows, columns = job.queries.whole().tokens, job.keys.whole().tokens
    mask, visibility = simplify_mask(spec.mask, rows, columns)
    source = DenseSource.over(k, v, columns)
    learned = any(x.requires_grad for x in (q, k, v, *job.learned))
    wanted = torch.is_grad_enabled() and learned
    call = Call(q, source, replace(spec, mask=mask), rows, True, visibility, wanted)
    return run(call, job.kernel)


def _traded(
    ranks: Ranks, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """What every rank sent to this one, of these shapes; differentiable."""
    leaving = [sum(part.numel() for part in parts) for parts in sent]
    sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    numbers = torch.cat([part.reshape(-1) for parts in sent for part in parts])
    flat = all_to_all(numbers, leaving, [sum(each) for each in sizes], ranks)
    pieces = torch.split(flat, [size for each in sizes for size in each])
    found = iter(pieces)
    return [[next(found).view(shape) for shape in each] for each in shapes]
