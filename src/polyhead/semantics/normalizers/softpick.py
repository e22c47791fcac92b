"""Softpick: a rectified softmax, without sinks and without large activations."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead._utils.checks import check_number
from polyhead.semantics.normalizer import Normalizer
from polyhead.semantics.tokens import Tokens


class Softpick(Normalizer, arguments={"eps": float}):
    """Weights max(0, eˢ − 1) / (Σ |eˢ − 1| + ε), which sum to at most 1.

    Zuhri et al. 2025, "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax",
    arXiv 2504.20966. Every exponential is times e⁻ᵐ, m the largest score or 0.

    Args:
        eps: ε, behind that factor.
    """

    def __init__(self, eps: float = 1e-8) -> None:
        check_number("Softpick eps", eps, least=0)
        self.eps = eps

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        # The result hardly depends on the peak, and its gradient not at all.
        peak = scores.detach().amax(dim=-1, keepdim=True).clamp(min=0.0)
        terms = torch.exp(scores - peak) - torch.exp(-peak)
        total = terms.abs().masked_fill(scores.isneginf(), 0.0).sum(dim=-1, keepdim=True)
        # A row whose scores are all 0 has no terms: its weights are 0.
        total = total + self.eps
        return terms.clamp(min=0.0) / total.masked_fill(total == 0.0, 1.0)

    def __repr__(self) -> str:
        return f"Softpick(eps={self.eps})"
