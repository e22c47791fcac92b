"""The test of compiled code at first use: small inputs, judged by float64."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.native.arguments import DTYPES, KVSegment, ScoreMods, Weight
from polyhead.native.code import Code
from polyhead.native.dropout import Dropout, kept
from polyhead.native.samples import samples


def disagreement(candidate: Code) -> str | None:
    """What a code computes wrongly on small inputs, or None: the test at first use."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(
                dtype
            )

        x, weight, bias = random(3, 80), random(37, 80), random(37)
        y = candidate.product(x, [Weight(weight, bias)])
        exact = x.double() @ weight.double().mT + bias.double()
        if not torch.allclose(y.double(), exact, atol=16 * close, rtol=close):
            return f"a product in {dtype} differs from float64"
        for queries in (1, 40):
            q, k, v = random(1, 4, queries, 32), random(1, 2, 150, 32), random(1, 2, 150, 48)
            high = torch.arange(150 - queries, 150, device="cpu")[None] + 1
            added = random(1, 4, 1, 150).float()
            seed, at = torch.tensor([7], device="cpu"), torch.arange(150, device="cpu")
            dropout = Dropout(0.25, seed, 150 - queries, 0)
            share = kept(0.25, seed, (1, 4), at[150 - queries :], at).double() / 0.75
            bounds = torch.full_like(high, 3), high
            mods = ScoreMods(bounds=bounds, bias=added, dropout=dropout)
            out, _ = candidate.attend(q, [KVSegment(k, v)], 0.2, mods)
            wide_k, wide_v = (t.double().repeat_interleave(2, dim=1) for t in (k, v))
            hidden = (at < 3) | (at >= high[0][:, None])
            scores = (q.double() @ wide_k.mT * 0.2 + added).masked_fill(hidden, -torch.inf)
            exact = scores.softmax(dim=-1) * share @ wide_v
            if not torch.allclose(out.double(), exact, atol=close, rtol=close):
                return f"attention in {dtype} differs from float64"
            grad = random(1, 4, queries, 48)
            out, lse = candidate.attend(q, [KVSegment(k, v)], 0.2, mods, lse=True)
            assert lse is not None
            found = candidate.gradients(
                q,
                KVSegment(k, v),
                0.2,
                mods,
                (out, lse),
                (grad, torch.zeros_like(lse)),
                of_bias=True,
            )
            weights, wide_grad = scores.softmax(dim=-1), grad.double()
            changes = wide_grad @ wide_v.mT * share - (wide_grad * exact).sum(dim=-1, keepdim=True)
            of_scores = weights * changes
            changes = 0.2 * of_scores
            of_bias = of_scores.sum(dim=2, keepdim=True)
            wanted = (
                changes @ wide_k,
                changes.mT @ q.double(),
                (weights * share).mT @ wide_grad,
                of_bias,
            )
            for mine, theirs in zip(found, wanted, strict=True):
                theirs = theirs.reshape(1, mine.shape[1], -1, *mine.shape[2:]).sum(dim=2)
                if not torch.allclose(mine.double(), theirs, atol=4 * close, rtol=close):
                    return f"a gradient in {dtype} differs from float64"
        q, k, v = random(1, 2, 5, 24), random(1, 2, 5, 24), random(1, 4, 5, 40)
        decay, beta = random(1, 4, 5, 24).float().sigmoid(), random(1, 4, 5).float().sigmoid()
        state = random(1, 4, 24, 40).float()
        exact, last = _recur(q * 0.2, k * 0.2, v, decay, beta, state)
        out = candidate.recur(q, k * 0.2, v, 0.2, decay, beta, None, state, delta=True)
        for mine, theirs, error in ((out, exact, 4 * close), (state, last, 4e-5)):
            if not torch.allclose(mine.double(), theirs, atol=error, rtol=error):
                return f"a recurrence in {dtype} differs from float64"
        for coded in samples(dtype):
            out, _ = candidate.attend(
                coded.q, [KVSegment(coded.k, coded.v, coding=coded.coding)], 0.2
            )
            if not torch.allclose(out.double(), coded.exact(0.2), atol=close, rtol=close):
                return f"attention over codes in {dtype} differs from float64"
    return None


def _recur(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``Code.recur`` computes with the delta rule, in float64: out and the last state."""
    q, k = (x.double().repeat_interleave(2, dim=1) for x in (q, k))
    state, outs = state.double(), []
    for t in range(q.shape[2]):
        state = state * decay[:, :, t, :, None]
        u = (v[:, :, t, None] - k[:, :, t, None] @ state) * beta[:, :, t, None, None]
        state = state + k[:, :, t, :, None] * u
        outs.append(q[:, :, t, None] @ state)
    return torch.cat(outs, dim=2), state
