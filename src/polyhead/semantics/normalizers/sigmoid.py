"""Sigmoid attention: every weight by its own score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead._utils.checks import check_number
from polyhead.semantics.normalizer import Normalizer, check_numbers
from polyhead.semantics.tokens import Tokens


class Sigmoid(Normalizer, arguments={"bias": float | Tensor}):
    """Weights σ(score + bias), each by its own score.

    Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", arXiv
    2409.04431, which takes bias = −log n for texts of n tokens.

    Args:
        bias: One number, or one of each head, ``[H]``, that may be learned.
    """

    def __init__(self, bias: float | Tensor = 0.0) -> None:
        if isinstance(bias, Tensor):
            check_numbers("Sigmoid bias", bias, "[H]")
        else:
            check_number("Sigmoid bias", bias)
        self.bias = bias

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,) if isinstance(self.bias, Tensor) else ()

    def of_heads(self, heads: Sequence[int]) -> Sigmoid:
        return Sigmoid(self.bias[list(heads)]) if isinstance(self.bias, Tensor) else self

    def check(self, batch: int, heads: int, queries: int) -> None:
        if isinstance(self.bias, Tensor) and len(self.bias) != heads:
            raise ValueError(f"Sigmoid bias must be [H] = [{heads}]: got [{len(self.bias)}]")

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        bias = self.bias.to(scores)[:, None, None] if isinstance(self.bias, Tensor) else self.bias
        return torch.sigmoid(scores + bias)

    def __repr__(self) -> str:
        said = list(self.bias.shape) if isinstance(self.bias, Tensor) else self.bias
        return f"Sigmoid(bias={said})"
