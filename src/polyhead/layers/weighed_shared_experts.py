"""A mixture of experts whose router weighs the shared networks too.

    s   = sigmoid(x Wr)                     of X routed and S shared networks
    out = scale · Σ_v w_v expert_v(x)       v: those chosen, and all shared;  w = s / Σ_v s

The shared networks take what share of the weight the chosen ones leave. Inkling (Thinking Machines
2026).

Shape letters: B batch, T tokens, E embed size, M all tokens of the batch, X experts, K visited,
S shared networks, F hidden size of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhead.config import WeighedSharedConfig
from polyhead.layers.experts import Experts
from polyhead.layers.registry import register_builder


class WeighedSharedExperts(Experts):
    """``Experts`` with its arguments; ``router`` is ``[X + S, E]``, and ``shared`` S · F wide."""

    config: WeighedSharedConfig

    def __init__(self, embed_dim: int, config: WeighedSharedConfig) -> None:
        super().__init__(embed_dim, config)
        self.router = nn.Linear(embed_dim, config.num_experts + config.num_shared, bias=False)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and numbers ``[M, K]`` of those chosen, and weights ``[M, S]`` of the shared."""
        config = self.config
        scores = self._logits(x).sigmoid()
        routed, shared = scores.tensor_split((config.num_experts,), dim=-1)
        choice = routed if self.choice_bias is None else routed + self.choice_bias
        chosen = choice.topk(config.experts_per_token, dim=-1).indices
        visited = torch.cat((routed.gather(1, chosen), shared), dim=-1)
        weights = visited / visited.sum(dim=-1, keepdim=True) * config.scale
        weights, share = weights.tensor_split((config.experts_per_token,), dim=-1)
        return weights, chosen, share

    def _answered(
        self, x: Tensor, weights: Tensor, chosen: Tensor, share: Tensor | None = None
    ) -> Tensor:
        out = self._visited(x.reshape(-1, x.shape[-1]), weights, chosen).view_as(x)
        assert self.shared is not None  # the configuration says so
        assert share is not None  # as ``_routed`` gives it
        gate: Any = self.shared.gate_proj
        share = share.to(x.dtype).view(*x.shape[:-1], -1, 1)
        hidden = self.shared._gated(x, gate).view(*share.shape[:-1], -1) * share
        shared: Tensor = self.shared.down_proj(hidden.flatten(-2))
        return out + shared


register_builder(WeighedSharedConfig, WeighedSharedExperts)
