"""A mixture of experts: every token visits a few of many feed-forward networks.

    s = score(x Wr)                      softmax over all experts, or a sigmoid each
    chosen = the k greatest s + bias     among the best groups of experts, where there are groups
    out = scale · Σ_chosen w_e expert_e(x) + shared(x),     w = s, or s / Σ_chosen s

Shazeer et al. 2017; Mixtral (2024); DeepSeek-V2 (2024), §2.2; DeepSeek-V3 (2024), §2.1.2: the bias
decides who is visited and never how much it counts.

Shape letters: B batch, T tokens, E embed size, M all tokens of the batch, X experts, K visited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import ConfigError
from polyhead.layers.config import Data, FeedForwardConfig
from polyhead.layers.feed_forward import FeedForward


@dataclass(frozen=True)
class MixtureConfig(Data):
    """The experts and how tokens choose among them.

    Attributes:
        expert: Each of the routed experts.
        num_experts: X.
        experts_per_token: K.
        shared: The network that every token visits, or None.
        scoring: ``"softmax"`` (Mixtral, DeepSeek-V2) or ``"sigmoid"`` (DeepSeek-V3).
        choice_bias: A number per expert that is added for the choice alone (DeepSeek-V3).
        normalise: Weights of the chosen experts sum to 1.
        scale: Factor of the routed experts' sum.
        groups: Experts are in so many groups, and
        groups_per_token: a token chooses within so many of them.
        group_score: What makes a group good: its best expert, or its best two together.

    Raises:
        ConfigError: Numbers that do not go together.
    """

    expert: FeedForwardConfig
    num_experts: int
    experts_per_token: int
    shared: FeedForwardConfig | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["best", "best two"] = "best"

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"scoring must be 'softmax' or 'sigmoid': got {self.scoring!r}")
        if self.group_score not in ("best", "best two"):
            raise ConfigError(f"group_score must be 'best' or 'best two': got {self.group_score!r}")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ConfigError(
                f"groups must divide num_experts={self.num_experts}: got {self.groups}"
            )
        if not 1 <= self.groups_per_token <= self.groups:
            raise ConfigError(
                f"groups_per_token must be 1 to groups={self.groups}: got {self.groups_per_token}"
            )
        within = self.num_experts // self.groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= within:
            raise ConfigError(
                f"experts_per_token must be 1 to the {within} experts that a token may choose "
                f"from: got {self.experts_per_token}"
            )


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
