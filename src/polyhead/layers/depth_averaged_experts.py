"""A mixture of experts whose router goes on from that of the layer before.

    s_l = x Wd + bd + g · s_(l−1)               g learned; the first layer adds nothing
    p   = softmax(gelu(gelu(norm(s) W1 + b1) W2 + b2) W3)
    out = Σ_chosen p_e expert_e(x)              chosen by p + bias; of expert_e(x) = 0 for e ≥ X

ZAYA1 (Zyphra 2025, arXiv 2511.17127): exponential depth averaging. A token that chooses the last
expert skips the layer's network.

Shape letters: M all tokens of the batch, E embed size, R features of the state, X experts that are
networks.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from polyhead.config import DepthAveragedMixtureConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import activate
from polyhead.layers.handed import Handed, given_by_layer_before
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder

_STATE = "router_state"


class DepthAveragedExperts(Experts):
    """``Experts`` that a network over a state chooses; its arguments.

    Attributes:
        state_proj: ``[R, E]`` and a bias.
        state_scale: ``[R]`` g, at first 1, or None.
        router_norm: Over the state.
        router_layers: Two matrices ``[R, R]`` with biases.
        router: ``[X + skips, R]``.
    """

    config: DepthAveragedMixtureConfig
    state_scale: nn.Parameter | None

    def __init__(self, embed_dim: int, config: DepthAveragedMixtureConfig) -> None:
        super().__init__(embed_dim, config)
        R = config.router_dim
        self.state_proj = nn.Linear(embed_dim, R)
        scale = nn.Parameter(torch.ones(R)) if config.reads_state else None
        self.register_parameter("state_scale", scale)
        self.router_norm = build_norm(R, config.router_norm)
        self.router_layers = nn.ModuleList(nn.Linear(R, R) for _ in range(2))

    def reset_parameters(self) -> None:
        """Sets the factors of the state before to 1. Projections and norms stay."""
        if self.state_scale is not None:
            nn.init.ones_(self.state_scale)

    def forward(self, x: Tensor, handed: Handed | None = None) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``.

        Args:
            x: ``[B, T, E]``.
            handed: What layers of the same call hand on: the state of the one before.

        Raises:
            ValueError: A layer that reads the state of another was called by itself.
        """
        state = linear(x, self.state_proj)
        if self.state_scale is not None:
            state = state + given_by_layer_before(handed, _STATE) * self.state_scale
        if handed is not None:
            handed.hand_on(_STATE, state)
        return self._answered(x, *self._scored(state.flatten(0, 1)))

    def route(self, x: Tensor) -> NoReturn:
        """Refused: the state of the layer before decides too, not ``x`` alone."""
        raise UnsupportedError(
            "these experts are chosen by the router's state of the layer before: got vectors alone"
        )

    def _logits(self, x: Tensor) -> Tensor:
        x = self.router_norm(x)
        for layer in self.router_layers:
            x = activate(linear(x, layer), "gelu")
        return super()._logits(x)

    def _weighed(self, number: int, x: Tensor, weight: Tensor) -> Tensor:
        if number < self.config.num_experts:
            return super()._weighed(number, x, weight)
        return torch.zeros_like(x)


register_builder(DepthAveragedMixtureConfig, DepthAveragedExperts)
