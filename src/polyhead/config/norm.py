"""Norms as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead._utils.checks import check_number
from polyhead.config.data import Data, check_choice
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class NormConfig(Data):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019).

    ``"affine"``: x · weight + bias, without a norm, and so without eps (MobileBERT's NoNorm).
    ``weight`` False: nothing is multiplied afterwards (OLMo; Llama 4's queries and keys).
    ``weight_offset`` is added to the stored weight (1.0 in Gemma and Nemotron, whose files store
    weight - 1).

    Raises:
        ConfigError: A combination that does not exist.
    """

    type: Literal["layernorm", "rmsnorm", "affine"] = "rmsnorm"
    eps: float = 1e-5
    bias: bool = False
    weight_offset: float = 0.0
    weight: bool = True

    def __post_init__(self) -> None:
        check_choice("norm type", self.type, ("layernorm", "rmsnorm", "affine"))
        check_number("eps", self.eps, least=0, error=ConfigError)
        if self.type == "rmsnorm" and self.bias:
            raise ConfigError("rmsnorm has no bias: got bias=True")
        if self.type == "affine" and (not self.weight or self.weight_offset):
            raise ConfigError(
                f"an affine norm has a weight and no weight_offset: got weight={self.weight}, "
                f"weight_offset={self.weight_offset}"
            )
        if not self.weight and (self.bias or self.weight_offset):
            raise ConfigError(
                f"a norm without weight has no bias and no weight_offset: got bias={self.bias}, "
                f"weight_offset={self.weight_offset}"
            )

    def parameters(self, features: int) -> int:
        """Parameters of the norm over so many features."""
        return features * (self.weight + self.bias)
