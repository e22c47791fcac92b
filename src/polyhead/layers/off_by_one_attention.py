"""Softmax-off-by-one: weights that sum to less than 1, so that a head may attend to nothing.

    weights_ij = exp(s_ij) / (1 + Σ_j exp(s_ij))

A sink of score 0 in each head that is not learned. Miller 2023, "Attention Is Off By One".

Shape letters: H query heads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyhead.config import AttentionConfig, OffByOneAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder
from polyhead.semantics.arguments import AttentionOptions


class OffByOneAttention(MultiHeadAttention):
    """``MultiHeadAttention`` by softmax-off-by-one, and its arguments; it has no parameter more."""

    config_class: ClassVar[type[AttentionConfig]] = OffByOneAttentionConfig

    def _with_own(self, q: Tensor, options: AttentionOptions) -> AttentionOptions:
        options["sinks"] = q.new_zeros(self.num_heads, dtype=torch.float32)
        return options


register_builder(OffByOneAttentionConfig, OffByOneAttention.from_config)
