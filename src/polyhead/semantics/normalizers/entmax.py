"""α-entmax: weights that are exactly 0 for keys far below the best."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead._utils.checks import check_number
from polyhead.semantics.normalizer import Normalizer
from polyhead.semantics.tokens import Tokens


class Entmax(Normalizer, arguments={"alpha": float}):
    """Weights [(α − 1) score − τ]₊^(1 / (α − 1)), τ such that they sum to 1.

    α = 2 is sparsemax (Martins & Astudillo 2016, arXiv 1602.02068); towards α = 1 it becomes the
    softmax. Peters et al. 2019, "Sparse Sequence-to-Sequence Models", arXiv 1905.05702. τ is found
    by bisection, and its derivatives are those of two steps of Newton's method.

    Args:
        alpha: α, above 1 and at most 2.
    """

    def __init__(self, alpha: float = 1.5) -> None:
        check_number("Entmax alpha", alpha, above=1, most=2)
        self.alpha = alpha

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        z = scores * (self.alpha - 1.0)
        z = z - z.detach().amax(dim=-1, keepdim=True)
        tau = self._threshold(z.detach())
        power = 1.0 / (self.alpha - 1.0)
        for _ in range(2):
            above = _powers(z - tau, power).sum(dim=-1, keepdim=True) - 1.0
            slope = power * _powers(z - tau, power - 1.0).sum(dim=-1, keepdim=True)
            tau = tau + above / slope
        return _powers(z - tau, power)

    def _threshold(self, z: Tensor) -> Tensor:
        """τ of rows whose maximum is 0, to the precision of their dtype."""
        low = torch.full_like(z[..., :1], -1.0)
        high = low + 1.0
        for _ in range(56 if z.dtype == torch.float64 else 26):
            middle = (low + high) / 2
            more = _powers(z - middle, 1.0 / (self.alpha - 1.0)).sum(-1, keepdim=True) >= 1.0
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        return low

    def __repr__(self) -> str:
        return f"Entmax(alpha={self.alpha})"


def _powers(x: Tensor, power: float) -> Tensor:
    """x₊ to a power of 0 or more; 0 for x ≤ 0, with derivatives 0."""
    positive = x > 0
    return x.where(positive, 1.0).pow(power).where(positive, 0.0)
