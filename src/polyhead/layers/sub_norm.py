"""Layers with a norm before their last projection (Sub-LN).

    out = norm(concat(head_1 … head_H)) Wo
    out = down(norm(act(gate(x)) · up(x)))

Wang et al. 2022, "Foundation Transformers" (arXiv 2210.06423), §2.1; BitNet has both, beside the
norms at the layer's entry.

Shape letters: B batch, H query heads, T queries, V value size, E embed size.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    SubNormAttentionConfig,
    SubNormFeedForwardConfig,
)
from polyhead.layers import fused
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.feed_forward import FeedForward, Form
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder


class SubNormAttention(MultiHeadAttention):
    """``MultiHeadAttention`` with ``out_norm`` over ``[H · V]``, and its arguments."""

    config_class: ClassVar[type[AttentionConfig]] = SubNormAttentionConfig
    config: SubNormAttentionConfig

    def _add_modules(self) -> None:
        self.out_norm = build_norm(self.num_heads * self.v_head_dim, self.config.out_norm)

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        normed: Tensor = self.out_norm(heads.transpose(1, 2).flatten(2))
        return normed.view(*x.shape[:2], self.num_heads, self.v_head_dim).transpose(1, 2)


class SubNormFeedForward(FeedForward):
    """``FeedForward`` with ``norm`` over its hidden features, and its arguments."""

    config_class: ClassVar[type[FeedForwardConfig]] = SubNormFeedForwardConfig
    config: SubNormFeedForwardConfig

    def _build(self, embed_dim: int, config: FeedForwardConfig) -> None:
        super()._build(embed_dim, config)
        self.norm = build_norm(self.hidden_dim, self.config.norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``."""
        gate = self._modules["gate_proj"]
        hidden = self._activated(self.up_proj(x)) if gate is None else self._gated(x, gate)
        if self.training and self.dropout:
            hidden = fused.dropped(hidden, self.dropout)
        out: Tensor = self.down_proj(self.norm(hidden))
        return out

    def form(self, x: Tensor) -> Form | None:
        """None: native code makes no norm between the projections."""
        return None


register_builder(SubNormAttentionConfig, SubNormAttention.from_config)
register_builder(SubNormFeedForwardConfig, SubNormFeedForward.from_config)
