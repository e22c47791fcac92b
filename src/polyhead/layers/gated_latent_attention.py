"""Gated latent attention: what heads give, times a sigmoid of the layer's input for each.

    out = concat(σ((x Wg)_1) · head_1 … σ((x Wg)_H) · head_H) Wo        with heads as in MLA

Ling 3.0 (Inclusion AI 2026).

Shape letters: B batch, H heads, T queries, V value size, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.config import GatedLatentAttentionConfig, LatentAttentionConfig
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.registry import register_builder


class GatedLatentAttention(MultiHeadLatentAttention):
    """``MultiHeadLatentAttention`` with ``gate_proj`` ``[H, E]``; built from its config."""

    def _build(self, embed_dim: int, config: LatentAttentionConfig, rope: RoPE | None) -> None:
        super()._build(embed_dim, config, rope)
        self.gate_proj = nn.Linear(embed_dim, config.num_heads, bias=False)

    def _finished(self, x: Tensor, heads: Tensor, of_queries: Tensor) -> Tensor:
        gates = linear(x, self.gate_proj)
        wide = gates.to(torch.promote_types(gates.dtype, torch.float32))
        return heads * torch.sigmoid(wide).to(heads.dtype).mT[..., None]


register_builder(GatedLatentAttentionConfig, GatedLatentAttention.from_config)
