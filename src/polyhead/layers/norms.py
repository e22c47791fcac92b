"""Normalisation over the features of one token.

    LayerNorm   (x − mean) / √(var + ε) · weight + bias      Ba et al. 2016
    RMSNorm     x / √(mean(x²) + ε) · weight                 Zhang & Sennrich 2019

In bfloat16 and float16 RMSNorm rounds where the Llama checkpoints were trained to: normalise in
float32, round, then multiply by the weight. With a weight offset it rounds once, at the end, as
Gemma does.

Shape letters: E the features that are normalised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.layers.config import NormConfig


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, built from ``NormConfig``.

    Args:
        dim: E.
        eps: Added to the variance.
        bias: Whether there is a bias.
    """

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(dim, eps=eps, bias=bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight per feature and no bias.

    Args:
        dim: E.
        eps: Added to the mean square.
        weight_offset: Added to the stored weight (Gemma stores weight − 1).
    """

    def __init__(self, dim: int, eps: float = 1e-5, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.dim, self.eps, self.weight_offset = dim, eps, weight_offset
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to the same, in the dtype of ``x``."""
        weight = self.weight
        if self.weight_offset:
            precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
            return normalise(_widened(x), self.eps).mul_(precise + self.weight_offset).to(x.dtype)
        return normalise(_widened(x), self.eps).to(x.dtype).mul_(weight)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.dim}, eps={self.eps}{offset}"


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) over the last dimension, a new tensor."""
    if not x.is_cpu:
        return F.rms_norm(x, list(x.shape[-1:]), None, eps)
    # On CPUs F.rms_norm is many small kernels; the norm is one pass and these are five.
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square().div_(x.shape[-1]).add_(eps).rsqrt_()


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def build_norm(dim: int, config: NormConfig) -> LayerNorm | RMSNorm:
    """The norm that ``config`` describes, over ``dim`` features.

    Raises:
        ValueError: A combination that does not exist: a bias in RMSNorm, an offset in LayerNorm.
    """
    if config.type == "layernorm":
        if config.weight_offset:
            raise ValueError(f"layernorm has no weight_offset: got {config.weight_offset}")
        return LayerNorm(dim, config.eps, config.bias)
    if config.type == "rmsnorm":
        if config.bias:
            raise ValueError("rmsnorm has no bias: got bias=True")
        return RMSNorm(dim, config.eps, config.weight_offset)
    raise ValueError(f"norm type must be 'layernorm' or 'rmsnorm': got {config.type!r}")
