"""Attention with contextual position encoding (CoPE).

    softmax_j(q_i · k_j · scale + q_i · e[p_ij])        p_ij = Σ_l sigmoid(q_i · k_l · scale)

over the keys l from j up to the query. e is read between whole positions. Golovneva et al. 2024,
"Contextual Position Encoding: Learning to Count What's Important", arXiv 2405.18719.

Shape letters: B batch, H query heads, T queries, D head size, n positions.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, CoPEAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder
from polyhead.semantics import CoPE
from polyhead.semantics.arguments import AttentionOptions


class CoPEAttention(MultiHeadAttention):
    """``MultiHeadAttention`` with contextual positions, for self-attention under a causal mask.

    Attributes:
        position_embedding: ``[n, D]`` e, of all heads, at first 0.
    """

    config_class: ClassVar[type[AttentionConfig]] = CoPEAttentionConfig
    config: CoPEAttentionConfig
    position_embedding: nn.Parameter

    def _add_modules(self) -> None:
        config = self.config
        self.position_embedding = nn.Parameter(torch.zeros(config.num_positions, config.head_dim))

    def reset_parameters(self) -> None:
        """Sets the embeddings to 0. Projections and norms stay."""
        super().reset_parameters()
        nn.init.zeros_(self.position_embedding)

    def _with_own(self, q: Tensor, options: AttentionOptions) -> AttentionOptions:
        options["normalizer"] = CoPE(q @ self.position_embedding.to(q.dtype).mT)
        return options


register_builder(CoPEAttentionConfig, CoPEAttention.from_config)
