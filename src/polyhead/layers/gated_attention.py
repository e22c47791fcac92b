"""Gated attention: what heads give, times a sigmoid (or softplus) of the layer's input.

    out = concat(head_1 … head_H) · sigmoid(x Wg)) Wo

Qiu et al. 2025, "Gated Attention for Large Language Models"; the full-attention layers of
Qwen3-Next, whose files keep the rows of ``gate_proj`` in ``q_proj``, behind those of each head.
A gate is one number for each feature of a head's output, or one for the whole head.

Shape letters: B batch, H query heads, T queries, V value size, E embed size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AttentionConfig, GatedAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder


class GatedAttention(MultiHeadAttention):
    """``MultiHeadAttention`` with ``gate_proj`` ``[H · V, E]`` or ``[H, E]``, and its arguments.

    Attributes:
        gate_bias: ``[H]``, or None.
    """

    gate_bias: nn.Parameter | None
    config_class: ClassVar[type[AttentionConfig]] = GatedAttentionConfig
    config: GatedAttentionConfig

    def _add_modules(self) -> None:
        config = self.config
        gates = self.num_heads * config.gate_dim
        self.gate_proj = nn.Linear(self.embed_dim, gates, bias=config.has_gate_bias)
        of_heads = config.gate_bias == "head"
        bias = nn.Parameter(torch.zeros(self.num_heads)) if of_heads else None
        self.register_parameter("gate_bias", bias)

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        gate = linear(x, self.gate_proj).view(*x.shape[:2], self.num_heads, -1)
        if self.gate_bias is not None:
            gate = gate + self.gate_bias[:, None]
        gate = torch.sigmoid(gate) if self.config.gate == "sigmoid" else F.softplus(gate)
        return heads * gate.transpose(1, 2)


register_builder(GatedAttentionConfig, GatedAttention.from_config)
