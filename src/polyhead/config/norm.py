"""Norms as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead.config.data import Data


@dataclass(frozen=True)
class NormConfig(Data):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019).

    ``weight_offset`` is added to the stored weight (1.0 in Gemma, whose files store weight - 1).
    """

    type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    eps: float = 1e-5
    bias: bool = False
    weight_offset: float = 0.0

    def parameters(self, features: int) -> int:
        """Of the norm over so many features."""
        return features * (1 + self.bias)
