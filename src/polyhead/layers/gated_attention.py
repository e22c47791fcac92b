"""Gated attention: every feature of a head's output times a sigmoid of the layer's input.

    out = concat(head_1 … head_H) · sigmoid(x Wg)) Wo

Qiu et al. 2025, "Gated Attention for Large Language Models"; the full-attention layers of
Qwen3-Next, whose files keep the rows of ``gate_proj`` in ``q_proj``, behind those of each head.

Shape letters: B batch, H query heads, T queries, V value size, E embed size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, GatedAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.registry import register_builder


class GatedAttention(MultiHeadAttention):
    """``MultiHeadAttention`` with ``gate_proj`` ``[H · V, E]``, and its arguments."""

    config_class: ClassVar[type[AttentionConfig]] = GatedAttentionConfig

    def _build(
        self,
        embed_dim: int,
        config: AttentionConfig,
        kdim: int | None,
        vdim: int | None,
        rope: RoPE | None,
    ) -> None:
        assert isinstance(config, GatedAttentionConfig)
        super()._build(embed_dim, config, kdim, vdim, rope)
        width = self.num_heads * self.v_head_dim
        self.gate_proj = nn.Linear(embed_dim, width, bias=config.has_gate_bias)

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        gate = torch.sigmoid(linear(x, self.gate_proj))
        return heads * gate.view(*x.shape[:2], self.num_heads, self.v_head_dim).transpose(1, 2)


register_builder(GatedAttentionConfig, GatedAttention.from_config)
