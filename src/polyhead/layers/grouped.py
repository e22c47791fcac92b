"""Attention and networks whose projections are grouped: each group of features reads its own part.

    y = [W_1 x_1; …; W_g x_g] + b        x cut into x_1 … x_g

Iandola et al. 2020, "SqueezeBERT", whose files have them as convolutions of width 1.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    GroupedAttentionConfig,
    GroupedFeedForwardConfig,
)
from polyhead.config.grouped import check_divisor
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.registry import register_builder


class GroupedLinear(nn.Module):
    """A linear module of groups.

    Args:
        in_features: Features of the input, a multiple of ``groups``.
        out_features: Features of the output, a multiple of ``groups``.
        groups: Number of groups.
        bias: Whether there is a bias.

    Attributes:
        weight: ``[out_features, in_features / groups]``.
        bias: ``[out_features]``, or None.

    Raises:
        ConfigError: Groups that do not divide the features.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        for features in (in_features, out_features):
            check_divisor("groups", groups, features)
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(out_features, in_features // groups))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """As ``forward``, without the bias."""
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        weight = self.weight.view(self.groups, -1, self.weight.shape[1])
        return torch.einsum("...gi,goi->...go", parts, weight).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, groups={self.groups}"


class GroupedAttention(MultiHeadAttention):
    """``MultiHeadAttention`` whose projections are ``GroupedLinear`` where they have groups."""

    config_class: ClassVar[type[AttentionConfig]] = GroupedAttentionConfig
    config: GroupedAttentionConfig

    def _add_modules(self) -> None:
        for name in ("q", "k", "v", "o"):
            _group(self, f"{name}_proj", getattr(self.config, f"{name}_groups"))


class GroupedFeedForward(FeedForward):
    """``FeedForward`` whose projections are ``GroupedLinear`` where they have groups."""

    config_class: ClassVar[type[FeedForwardConfig]] = GroupedFeedForwardConfig
    config: GroupedFeedForwardConfig

    def _build(self, embed_dim: int, config: FeedForwardConfig) -> None:
        super()._build(embed_dim, config)
        for name in ("up", "down"):
            _group(self, f"{name}_proj", getattr(self.config, f"{name}_groups"))


def _group(module: nn.Module, name: str, groups: int) -> None:
    """Puts a grouped projection in the place of a plain one."""
    plain = module.get_submodule(name)
    assert isinstance(plain, nn.Linear)
    if groups > 1:
        made = GroupedLinear(
            plain.in_features, plain.out_features, groups, bias=plain.bias is not None
        )
        module.add_module(name, made)


register_builder(GroupedAttentionConfig, GroupedAttention.from_config)
register_builder(GroupedFeedForwardConfig, GroupedFeedForward.from_config)
