"""Normalisation over the features of one token.

    LayerNorm   (x − mean) / √(var + ε) · weight + bias      Ba et al. 2016
    RMSNorm     x / √(mean(x²) + ε) · weight                 Zhang & Sennrich 2019

In bfloat16 and float16 RMSNorm rounds where the Llama checkpoints were trained to: normalize in
float32, round, then multiply by the weight. With a weight offset it rounds once, at the end, as
Gemma does.

Shape letters: E the features that are normalized.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead._utils.checks import check_int
from polyhead.config import NormConfig
from polyhead.errors import ConfigError
from polyhead.layers import fused
from polyhead.layers.fixed import Fixed
from polyhead.semantics.tokens import is_tracing

_NARROW = (torch.bfloat16, torch.float16)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, built from ``NormConfig``.

    Args:
        dim: Features E that are normalized.
        eps: Added to the variance.
        bias: Whether there is a bias.
        weight: Whether there is a weight; without one there is no bias.
        weight_offset: Added to the stored weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        bias: bool = True,
        weight: bool = True,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = weight_offset
        super().__init__(dim, eps=eps, elementwise_affine=weight, bias=bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to the same."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if x.shape[-1:] == self.normalized_shape:
            code = native.code_for(x)
            if code is not None and x.numel() and _are_plain(x, weight, bias):
                by = native.NormWeight(weight, self.eps, self.weight_offset, bias, centred=True)
                return code.norm(_rows(x), by).view(x.shape)
        if not self.weight_offset or self.weight is None:
            return super().forward(x)
        moved = self.weight + self.weight_offset
        return F.layer_norm(x, self.normalized_shape, moved, self.bias, self.eps)


class RMSNorm(Fixed):
    """Root-mean-square norm with a weight per feature, or none, and no bias.

    Args:
        dim: Features E that are normalized.
        eps: Added to the mean square.
        weight_offset: Added to the stored weight (Gemma stores weight − 1).
        weight: Whether there is a weight.

    Attributes:
        config: Everything but ``dim`` as data; neither can be assigned.
        eps, weight_offset: As the next call takes them; they may be assigned.
    """

    _fixed = frozenset({"config", "dim"})

    weight: nn.Parameter | None

    def __init__(
        self, dim: int, eps: float = 1e-5, weight_offset: float = 0.0, weight: bool = True
    ) -> None:
        super().__init__()
        check_int("dim", dim, least=1)
        self.config = NormConfig("rmsnorm", eps, weight_offset=weight_offset, weight=weight)
        self.dim, self.eps, self.weight_offset = dim, eps, weight_offset
        self.register_parameter("weight", nn.Parameter(torch.empty(dim)) if weight else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to the same, in the dtype of ``x``."""
        weight = self.weight
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must have {self.dim} features: got shape {list(x.shape)}")
        dtype = x.dtype
        code = native.code_for(x)
        if code is not None and x.numel() and _are_plain(x, weight):
            by = native.NormWeight(weight, self.eps, self.weight_offset)
            return code.norm(_rows(x), by).view(x.shape)
        if weight is None:
            return normalize(x.float() if dtype in _NARROW else x, self.eps).to(dtype)
        if (normed := fused.rms_norm(x, weight, self.eps, self.weight_offset)) is not None:
            return normed
        wide = x.float() if dtype in _NARROW else x
        if self.weight_offset:
            precise = weight.float() if weight.dtype in _NARROW else weight
            return normalize(wide, self.eps).mul_(precise + self.weight_offset).to(dtype)
        y = normalize(wide, self.eps)
        if wide is not x:
            y = y.to(dtype)
        return y.mul_(weight)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.dim}, eps={self.eps}{offset}"


def _rows(x: Tensor) -> Tensor:
    """``[rows, E]``, the last dimension dense."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _are_plain(x: Tensor, *parameters: Tensor | None) -> bool:
    return all(each is None or native.is_plain(each, x) for each in parameters)


def normalize(x: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) over the last dimension, a new tensor."""
    plain = type(x) is Tensor and x.is_cpu
    if torch.is_grad_enabled() or not plain or is_tracing():
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


class HeadNorm(Fixed):
    """A norm over each head's features with a weight ``[H, D]`` of its own (Cohere, StableLM).

    Args:
        heads: Number of heads H.
        dim: Head size D.
        config: Kind, epsilon and bias of the norm.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, heads: int, dim: int, config: NormConfig) -> None:
        super().__init__()
        if config.type == "affine":
            raise ConfigError("norms of each head are no affine ones: got type='affine'")
        self.config = config
        shape = (heads, dim)
        weight = nn.Parameter(torch.empty(shape)) if config.weight else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", nn.Parameter(torch.empty(shape)) if config.bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.config.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H, D]`` to the same."""
        config, weight, bias = self.config, self.weight, self.bias
        centred = config.type == "layernorm"
        code = native.code_for(x)
        if code is not None and x.numel() and _are_plain(x, weight, bias):
            by = native.NormWeight(weight, config.eps, config.weight_offset, bias, centred)
            return code.norm(_rows(x), by).view(x.shape)
        wide = x.float() if x.dtype in _NARROW else x
        if centred:
            y = F.layer_norm(wide, x.shape[-1:], eps=config.eps)
        else:
            y = normalize(wide, config.eps)
            if not config.weight_offset:
                y = y.to(x.dtype)
        if weight is not None:
            y = y * (weight + config.weight_offset)
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return "" if self.weight is None else f"{list(self.weight.shape)}"


class Affine(Fixed):
    """Scales and shifts every feature: x · weight + bias (MobileBERT's NoNorm).

    Args:
        dim: Features E.
        config: Whether there is a bias.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, dim: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(dim))
        self.register_parameter("bias", nn.Parameter(torch.empty(dim)) if config.bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to the same."""
        y = x * self.weight
        return y if self.bias is None else y + self.bias


def build_norm(dim: int, config: NormConfig) -> LayerNorm | RMSNorm | Affine:
    """The norm that ``config`` describes, over ``dim`` features."""
    if config.type == "affine":
        return Affine(dim, config)
    if config.type == "layernorm":
        return LayerNorm(dim, config.eps, config.bias, config.weight, config.weight_offset)
    norm = RMSNorm(dim, config.eps, config.weight_offset, config.weight)
    vars(norm)["config"] = config  # with fields that RMSNorm does not take
    return norm
