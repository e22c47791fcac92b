"""Scalable-Softmax: scores that grow with the logarithm of their number.

    weights_i = softmax_j(s_h · log n_i · q_i · k_j · scale)        n_i = position of i + 1

s is a learned number of each head, and n the number of keys up to the query's own, those within the
window where there is one. The weight of the largest score then does not vanish as a text grows
longer. Nakanishi 2025, "Scalable-Softmax Is Superior for Attention", arXiv 2501.19399, eq. 4.

It is a factor of queries, so every kernel and every cache serves.

Shape letters: B batch, H query heads, T queries, D head size, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, ScalableSoftmaxAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder


class ScalableSoftmaxAttention(MultiHeadAttention):
    """``MultiHeadAttention`` by Scalable-Softmax, for self-attention under a causal mask.

    The constructor takes the arguments of ``MultiHeadAttention``; ``from_config`` reaches all.

    Attributes:
        growth: ``[H]`` s.
    """

    config_class: ClassVar[type[AttentionConfig]] = ScalableSoftmaxAttentionConfig
    growth: nn.Parameter

    def _add_modules(self) -> None:
        self.growth = nn.Parameter(torch.empty(self.num_heads))
        self._rotates_together = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets s to 0.43, the paper's fit of what models learn. Projections stay."""
        super().reset_parameters()
        nn.init.constant_(self.growth, 0.43)

    def _queries(self, projected: Tensor, positions: int | Tensor) -> Tensor:
        q = super()._queries(projected, positions)
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + q.shape[2], device=q.device)
        precise = torch.promote_types(q.dtype, torch.float32)
        seen = (positions + 1).clamp(1, self.config.window)
        grown = seen.to(precise).log()[..., None, :, None] * self.growth.to(precise)[:, None, None]
        return (q * grown).to(q.dtype)

    def _cross_attention(self, *_: Any) -> NoReturn:
        raise ValueError("Scalable-Softmax attention is self-attention: got a context")


register_builder(ScalableSoftmaxAttentionConfig, ScalableSoftmaxAttention.from_config)
