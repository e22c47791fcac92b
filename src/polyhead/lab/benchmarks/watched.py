"""Cases of looking at heads: what entropy, largest weights and mass of keys cost beside a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyhead.interpret.probe import probe
from polyhead.lab.benchmarks.case import Case, Contestant, Settings, close
from polyhead.layers.hooks import Hooked
from polyhead.semantics import Causal, DenseSource

_HEAD_DIM, _TOP = 64, 8


class _Attention(Hooked):
    """Causal attention and nothing else, for a probe to watch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(
            q, DenseSource(k, v), mask=Causal(), bias=None, scale=_HEAD_DIM**-0.5,
            q_positions=None, dropout_p=0.0, kernel="auto",
        )  # fmt: skip


def cases(settings: Settings) -> Iterator[Case]:
    """Attention under a probe: entropy, top 8 and mass per key, against torch's T × T weights."""
    on_gpu = settings.device != "cpu"
    lengths = (4096, 32768) if on_gpu else (1024, 4096)
    for dtype in settings.dtypes if on_gpu else (torch.float32,):
        for T in lengths[:1] if settings.quick else lengths:
            heads = 16 if on_gpu else max(2, 8192 // T)
            yield of_heads(*torch.randn(3, 1, heads, T, _HEAD_DIM).to(dtype))


def of_heads(q: Tensor, k: Tensor, v: Tensor) -> Case:
    """Of heads ``[1, H, T, D]``, on their device."""
    layer, (_, heads, T, D) = _Attention(), q.shape

    def watched() -> Tensor:
        with probe(layer, top_k=_TOP) as seen:
            layer(q, k, v)
        view: Any = seen[0]
        view.measure(("entropy", "top_weights", "top_keys", "received"))
        return torch.cat([view.entropy[..., None], view.top_weights], dim=-1)[:, :, _TOP:]

    def by_weights() -> Tensor:
        hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        rows = []
        for head in range(heads):  # one head at a time: each needs T × T numbers
            scores = q[0, head] @ k[0, head].mT * D**-0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            _ = weights @ v[0, head], weights.sum(0)
            entropy = torch.special.entr(weights).sum(-1, keepdim=True)
            rows.append(torch.cat([entropy, weights.topk(_TOP).values], dim=-1)[_TOP:])
        return torch.stack(rows)[None]

    peers = {
        "unwatched": Contestant(lambda: layer(q, k, v), None),
        "torch, T × T weights": Contestant(by_weights, close(q.dtype)),
    }
    pairs = heads * T * (T + 1) // 2
    return Case(f"heads × {D}, causal", T, q.dtype, watched, peers, work=4.0 * pairs * D)
