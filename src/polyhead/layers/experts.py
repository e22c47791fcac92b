"""A mixture of experts: every token visits a few of many feed-forward networks.

    s = score(x Wr)                      softmax over all experts, or a sigmoid each
    chosen = the k greatest s + bias     among the best groups of experts, where there are groups
    out = scale · Σ_chosen w_e expert_e(x) + shared(x),     w = s, or s / Σ_chosen s

Shazeer et al. 2017; Mixtral (2024); DeepSeek-V2 (2024), §2.2; DeepSeek-V3 (2024), §2.1.2: the bias
decides who is visited and never how much it counts.

Shape letters: B batch, T tokens, E embed size, M all tokens of the batch, X experts, K visited.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import MixtureConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.built import builds
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.unbuilt import refuse_unbuilt


class Experts(nn.Module):
    """In place of a ``FeedForward``.

    Args:
        embed_dim: E.
        config: The experts and the choice.

    Attributes:
        router: ``[X, E]`` weight, without bias.
        choice_bias: ``[X]``, or None.
        experts: The routed networks.
        shared: The network that every token visits, or None.
    """

    choice_bias: Tensor | None

    def __init__(self, embed_dim: int, config: MixtureConfig) -> None:
        super().__init__()
        refuse_unbuilt(config, "shared_gate", "router_bias", "jitter", "weighs", "capacity")
        if config.scoring == "sparsemixer":
            raise UnsupportedError("MixtureConfig.scoring='sparsemixer' is not computed yet")
        self.config = config
        self.router = nn.Linear(embed_dim, config.num_experts, bias=False)
        bias = torch.zeros(config.num_experts) if config.choice_bias else None
        self.register_buffer("choice_bias", bias)
        self.experts = nn.ModuleList(
            FeedForward.from_config(embed_dim, config.expert) for _ in range(config.num_experts)
        )
        shared = config.shared
        self.shared = None if shared is None else FeedForward.from_config(embed_dim, shared)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for number in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == number)
            made = self.experts[number](flat[rows])
            out = out.index_add(0, rows, (made * weights[rows, places, None]).to(out.dtype))
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[M, K]`` in float32 and numbers ``[M, K]`` of the experts that tokens visit.

        Args:
            x: ``[M, E]``.
        """
        config = self.config
        precise = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        if config.groups > 1:
            grouped = choice.view(len(x), config.groups, -1)
            best = grouped.topk(2 if config.group_score == "best two" else 1, dim=-1).values
            kept = best.sum(dim=-1).topk(config.groups_per_token, dim=-1).indices
            open_ = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept, True)
            choice = grouped.masked_fill(~open_[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.scale, chosen

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.experts_per_token} of {config.num_experts}, scoring={config.scoring}"


builds(MixtureConfig, Experts)
