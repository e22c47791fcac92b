"""A mixture of experts some of which give back their input, so that easy tokens cost less.

    out = Σ_chosen w_e expert_e(x),    expert_e(x) = x for e ≥ X

LongCat-Flash 2025 (arXiv 2509.01322), §2.1: zero-computation experts.

Shape letters: M tokens, E embed size, X experts that are networks.
"""

from __future__ import annotations

from torch import Tensor

from polyhead.config import IdentityMixtureConfig
from polyhead.layers.experts import Experts
from polyhead.layers.registry import register_builder


class IdentityExperts(Experts):
    """``Experts``, some of which give back their input times their weight; its arguments."""

    config: IdentityMixtureConfig

    def _weighed(self, number: int, x: Tensor, weight: Tensor) -> Tensor:
        if number < self.config.num_experts:
            return super()._weighed(number, x, weight)
        return (x * weight).to(x.dtype)


register_builder(IdentityMixtureConfig, IdentityExperts)
