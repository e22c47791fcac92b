"""Gated attention: every feature of a head's output times a sigmoid of the layer's input.

    out = concat(head_1 … head_H) · sigmoid(x Wg)) Wo

Qiu et al. 2025, "Gated Attention for Large Language Models"; the full-attention layers of
Qwen3-Next, whose files keep the rows of ``gate_proj`` in ``q_proj``, behind those of each head.

Shape letters: B batch, H query heads, T queries, V value size, E embed size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, ParameterGroup
from polyhead.config.layout import shared
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.registry import register_builder


@dataclass(frozen=True)
class GatedAttentionConfig(AttentionConfig, kind="gated"):
    """``AttentionConfig`` with a gate, whose projection has biases as those of q, k and v."""

    @property
    def layout(self) -> str:
        return f"gated {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, self.value_dim * embed_dim)
        if self.qkv_bias:
            yield ParameterGroup("attention", self.num_heads, self.value_dim, multiplied=False)

    def peak_activation_elements(
        self, embed_dim: int, *, tokens: int, batch_size: int, ranks: int, half: bool
    ) -> int:
        given = {"tokens": tokens, "batch_size": batch_size, "ranks": ranks}
        plain = super().peak_activation_elements(embed_dim, half=half, **given)
        # Beside q, k and v the heads' outputs, the gate, and its source or what it makes of them.
        H, G = shared(self.num_heads, ranks), shared(self.num_kv_heads, ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        return max(plain, made + 3 * H * self.value_dim)


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
        super()._build(embed_dim, config, kdim, vdim, rope)
        width = self.num_heads * self.v_head_dim
        self.gate_proj = nn.Linear(embed_dim, width, bias=config.qkv_bias)

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        gate = torch.sigmoid(linear(x, self.gate_proj))
        return heads * gate.view(*x.shape[:2], self.num_heads, self.v_head_dim).transpose(1, 2)


register_builder(GatedAttentionConfig, GatedAttention.from_config)
