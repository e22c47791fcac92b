"""Normalisation over the features of one token.

    LayerNorm   (x − mean) / √(var + ε) · weight + bias      Ba et al. 2016
    RMSNorm     x / √(mean(x²) + ε) · weight                 Zhang & Sennrich 2019

In bfloat16 and float16 RMSNorm rounds where the Llama checkpoints were trained to: normalise in
float32, round, then multiply by the weight. With a weight offset it rounds once, at the end, as
Gemma does.

Shape letters: E the features that are normalised.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead.config import NormConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.unbuilt import refuse_unbuilt

_NARROW = (torch.bfloat16, torch.float16)


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

    Attributes:
        config: Everything but ``dim`` as data.
    """

    def __init__(self, dim: int, eps: float = 1e-5, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.dim, self.eps, self.weight_offset = dim, eps, weight_offset
        self.config = NormConfig("rmsnorm", eps, weight_offset=weight_offset)
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to the same, in the dtype of ``x``."""
        weight = self.weight
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must have {self.dim} features: got shape {list(x.shape)}")
        code = native.code_for(x)
        if code is not None and native.is_plain(weight, x) and x.numel():
            rows = x.reshape(-1, self.dim)
            if rows.stride(-1) != 1:
                rows = rows.contiguous()
            return code.norm(rows, weight, self.eps, self.weight_offset).view(x.shape)
        dtype = x.dtype
        wide = x.float() if dtype in _NARROW else x
        if self.weight_offset:
            precise = weight.float() if weight.dtype in _NARROW else weight
            return normalise(wide, self.eps).mul_(precise + self.weight_offset).to(dtype)
        y = normalise(wide, self.eps)
        if wide is not x:
            y = y.to(dtype)
        return y.mul_(weight)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.dim}, eps={self.eps}{offset}"


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) over the last dimension, a new tensor."""
    if torch.is_grad_enabled() or type(x) is not Tensor or not x.is_cpu:
        return F.rms_norm(x, list(x.shape[-1:]), None, eps)
    # On CPUs F.rms_norm is many small kernels, and slower than these four on one token or many.
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_and_eps = torch.addcmul(_epsilon(eps, x.dtype), norm, norm, value=1.0 / x.shape[-1])
    return x * mean_and_eps.rsqrt_()


@cache
def _epsilon(eps: float, dtype: torch.dtype) -> Tensor:
    # A tensor, because a Python number costs an operation more than the operation itself.
    with torch.inference_mode(False):
        return torch.tensor(eps, dtype=dtype, device="cpu")


def build_norm(dim: int, config: NormConfig) -> LayerNorm | RMSNorm:
    """The norm that ``config`` describes, over ``dim`` features."""
    refuse_unbuilt(config, "weight")
    if config.type == "layernorm":
        if config.weight_offset:
            raise UnsupportedError("layernorm with a weight_offset is not computed yet")
        return LayerNorm(dim, config.eps, config.bias)
    norm = RMSNorm(dim, config.eps, config.weight_offset)
    norm.config = config
    return norm
