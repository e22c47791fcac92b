"""Forgetting attention: scores lose what gates forgot between the key and the query.

    score_ij = q_i · k_j · scale + Σ_{l = j+1 … i} log f_l        f_l = sigmoid(x_l Wf + b)

with a gate f for each head. Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a
Forget Gate", arXiv 2503.02130, eq. 7 (FoX); no other positions are needed. log f is a memory of its
own. The sum is a difference of cumulative sums over the keys that are held, a number of the query
and one of the key, whatever order the keys lie in.

Shape letters: B batch, H query heads, T queries, S keys, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import AttentionConfig, ForgettingAttentionConfig
from polyhead.layers.causal_attention import CausalAttention
from polyhead.layers.causal_convolution import convolved_call
from polyhead.layers.handed import Handed
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.semantics import DenseSource, Keep, KeyValueSource, RelativeContentBias
from polyhead.semantics.arguments import query_tokens


class ForgettingAttention(CausalAttention):
    """``CausalAttention`` with forget gates; it takes no bias of scores.

    The constructor takes the arguments of ``MultiHeadAttention``; ``from_config`` reaches all.

    Attributes:
        forget_proj: ``[H, E]``, with a bias.
    """

    config_class: ClassVar[type[AttentionConfig]] = ForgettingAttentionConfig
    config: ForgettingAttentionConfig
    called = "attention with forget gates"

    def _add_modules(self) -> None:
        self.forget_proj = nn.Linear(self.embed_dim, self.num_heads)

    def _over(self, x: Tensor, real: Tensor | None, *more: Tensor, **call: Any) -> Tensor:
        if call.get("bias") is not None:
            raise ValueError("this layer has a bias of its own (forget gates): got another")
        if real is not None:
            call["mask"] = call["mask"] & Keep(real[:, None, None])
        return super()._over(x, real, *more, **call)

    def _self_attention(
        self, x: Tensor, positions: Tensor | None, cache: Any, handed: Handed | None
    ) -> tuple[Tensor, KeyValueSource, RelativeContentBias]:
        at: int | Tensor = 0 if cache is None else cache.length
        q, k, v = self._project(x, at if positions is None else positions)
        gates = linear(x, self.forget_proj)
        wide = gates.to(torch.promote_types(gates.dtype, torch.float32))
        logs = F.logsigmoid(wide).to(x.dtype)
        with convolved_call(x, positions, cache) as step:
            source: KeyValueSource = DenseSource(k, v, positions)
            if isinstance(step, Step):
                source = step.append("kv", k, v)
                held = step.append("gates", logs[:, None], logs[:, None]).gather()[0]
                logs = held[:, 0]
        return q, source, _forgotten(logs, q, source, positions)


def _forgotten(
    logs: Tensor, q: Tensor, source: KeyValueSource, positions: Tensor | None
) -> RelativeContentBias:
    """What scores lose.

    Args:
        logs: ``[B, S, H]`` of the source's keys.
        q: ``[B, H, T, D]``.
        source: The keys.
        positions: Of the queries, as in ``attention``.
    """
    B, H, T, _ = q.shape
    S, keys = logs.shape[1], source.tokens
    of_queries = query_tokens(q, source, positions).position_tensor(q.device).expand(B, T)
    # In float64, as sums grow with the text, while their differences at near keys are small.
    logs = logs.mT.to(torch.float64)
    at, order = keys.position_tensor(q.device).expand(B, S), None
    if keys.positions is not None:
        at, order = at.sort(dim=1, stable=True)
        order = order[:, None].expand(B, H, S)
        logs = logs.gather(2, order)
    sums = logs.cumsum(dim=2)
    last = torch.searchsorted(at.contiguous(), of_queries.contiguous(), right=True) - 1
    of_query = sums.gather(2, last.clamp(min=0)[:, None].expand(B, H, T))
    of_key = sums if order is None else torch.empty_like(sums).scatter(2, order, sums)
    return RelativeContentBias(of_query[..., None], -of_key[..., None])


register_builder(ForgettingAttentionConfig, ForgettingAttention.from_config)
