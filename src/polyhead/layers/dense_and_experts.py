"""A dense network beside a mixture of experts, both of the residual stream.

    r   = x / rms(x) · router_scale / √E                        what the router reads
    out = norm(dense(norm(x))) + norm(Σ_chosen w_e · scale_e · expert_e(norm(x)))

with a norm of its own at each place, and w the mixture's weights by r. Gemma 4 (2026), 26B-A4B.

Shape letters: B batch, T tokens, E embed size, X experts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyhead.config import DenseAndExpertsConfig
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.fixed import Fixed
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder


class DenseAndExperts(Fixed):
    """``FeedForward`` and ``Experts`` in place of one of them; norms what it reads by itself.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Both, and the norms.

    Attributes:
        dense: The network that every token visits.
        mixture: The experts and their router.
        router_scale: ``[E]``, factors of what the router reads.
        expert_scale: ``[X]``, factors of the experts' weights.
    """

    def __init__(self, embed_dim: int, config: DenseAndExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = FeedForward.from_config(embed_dim, config.dense)
        self.mixture = Experts(embed_dim, config.mixture)
        self.dense_norm = build_norm(embed_dim, config.norm)
        self.dense_out_norm = build_norm(embed_dim, config.norm)
        self.mixture_norm = build_norm(embed_dim, config.norm)
        self.mixture_out_norm = build_norm(embed_dim, config.norm)
        self.router_norm = build_norm(embed_dim, replace(config.norm, weight=False))
        self.router_scale = nn.Parameter(torch.ones(embed_dim))
        self.expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` of the residual stream to ``[B, T, E]``."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = self.dense_out_norm(self.dense(self.dense_norm(x)))
        read = self.router_norm(flat) * self.router_scale * (1.0 / math.sqrt(x.shape[-1]))
        weights, chosen = self.mixture.route(read)
        weights = weights * self.expert_scale[chosen]
        made = self.mixture._visited(self.mixture_norm(flat), weights, chosen)
        normed: Tensor = self.mixture_out_norm(made.view_as(x))
        return out + normed


register_builder(DenseAndExpertsConfig, DenseAndExperts)
