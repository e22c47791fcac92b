"""A mixture of experts whose router weighs those that all tokens visit beside those chosen.

    s   = score(x Wr)                       of X experts to choose from, and S shared ones
    out = scale · Σ_v w_v expert_v(x)       v: the k greatest s + bias of X, and all S

With w = s / Σ_v s the shared experts take what share of the weight the chosen ones leave. Inkling
(Thinking Machines 2026).

Shape letters: E embed size, M all tokens of the batch, X experts, K chosen, S shared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.config import WeighedSharedConfig
from polyhead.layers.experts import Experts, scores_of
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.registry import register_builder


class WeighedSharedExperts(Experts):
    """``Experts`` with its arguments; ``router`` has X + S rows, and so many are ``experts``."""

    config: WeighedSharedConfig

    def __init__(self, embed_dim: int, config: WeighedSharedConfig) -> None:
        super().__init__(embed_dim, config)
        count = config.num_experts + config.num_shared
        self.router = nn.Linear(embed_dim, count, bias=False)
        more = (FeedForward.from_config(embed_dim, config.expert) for _ in range(config.num_shared))
        self.experts.extend(more)

    def _scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers ``[M, K + S]``, the shared experts last."""
        config, logits = self.config, self._logits(x)
        X, S = config.num_experts, config.num_shared
        scores = scores_of(logits, config.scoring)
        choice = (logits if config.choice_bias_of == "logits" else scores)[:, :X]
        if self.choice_bias is not None:
            choice = choice + self.choice_bias
        chosen = choice.topk(config.experts_per_token, dim=-1).indices
        shared = torch.arange(X, X + S, device=x.device).expand(len(x), S)
        visited = torch.cat((chosen, shared), dim=1)
        return self._weights(scores, visited), visited


register_builder(WeighedSharedConfig, WeighedSharedExperts)
