"""A feed-forward network as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead.config.data import Data


@dataclass(frozen=True)
class FeedForwardConfig(Data):
    """A position-wise feed-forward network; ``gated`` multiplies by a second projection (GLU).

    silu + gated is SwiGLU, gelu or gelu_tanh + gated is GeGLU (Shazeer 2020).
    """

    hidden_dim: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "silu"
    gated: bool = True
    bias: bool = False
    dropout: float = 0.0
