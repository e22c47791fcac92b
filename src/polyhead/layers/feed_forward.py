"""The position-wise feed-forward network.

    down(act(up(x)))                    Vaswani et al. 2017, eq. 2
    down(act(gate(x)) · up(x))          gated: SwiGLU with silu, GeGLU with gelu (Shazeer 2020)

Shape letters: B batch, T tokens, E embed size, F hidden size.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import FeedForwardConfig
from polyhead.errors import UnsupportedError
from polyhead.layers import linear as few_rows
from polyhead.layers.built import builds
from polyhead.layers.unbuilt import refuse_unbuilt

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies an activation by name."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "gelu":
        return F.gelu(x)
    return torch.relu(x)


class FeedForward(nn.Module):
    """Two projections with an activation between, or three with a gate.

    Args:
        embed_dim: E.
        hidden_dim: F.
        activation: ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"silu"``.
        gated: Multiply the activated ``gate_proj`` with ``up_proj``.
        bias: Of every projection.
        dropout: On the hidden features, when training.

    Attributes:
        config: Everything but ``embed_dim`` as data.

    Raises:
        ValueError: An unknown activation or a share that is no probability.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        activation: Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation not in ("relu", "gelu", "gelu_tanh", "silu"):
            raise ValueError(
                f"activation must be 'relu', 'gelu', 'gelu_tanh' or 'silu': got {activation!r}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1: got {dropout}")
        self.activation, self.gated, self.dropout = activation, gated, dropout
        self.hidden_dim = hidden_dim
        self.config = FeedForwardConfig(hidden_dim, activation, gated, bias, dropout)
        gate = nn.Linear(embed_dim, hidden_dim, bias=bias) if gated else None
        self.register_module("gate_proj", gate)
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)

    @classmethod
    def from_config(cls, embed_dim: int, config: FeedForwardConfig) -> Self:
        """The network that ``config`` describes."""
        refuse_unbuilt(config, "clamp", "up_offset")
        if config.activation not in ("relu", "gelu", "gelu_tanh", "silu"):
            raise UnsupportedError(f"activation {config.activation!r} is not computed yet")
        network = cls(
            embed_dim,
            config.hidden_dim,
            config.activation,
            config.gated,
            config.bias,
            config.dropout,
        )
        network.config = config
        return network

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``."""
        modules = self._modules  # faster than attributes, which nn.Module looks up here
        up, gate, down = modules["up_proj"], modules["gate_proj"], modules["down_proj"]
        if not (self.training and self.dropout):
            y = few_rows.feed_forward(x, gate, up, down, self.activation)
            if y is not None:
                return y
        if gate is None:
            hidden = activate(self.up_proj(x), self.activation)
        else:
            hidden, values = activate(gate(x), self.activation), self.up_proj(x)
            # In place where nothing is recorded: a fresh buffer of this size costs more than the
            # product, because its pages are touched for the first time.
            hidden = hidden * values if torch.is_grad_enabled() else hidden.mul_(values)
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        out: Tensor = self.down_proj(hidden)
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation}, gated={self.gated}, dropout={self.dropout}"


builds(FeedForwardConfig, FeedForward.from_config)
