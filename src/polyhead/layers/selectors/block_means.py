"""Mixture of block attention: blocks are chosen by the mean of their keys.

    s[t, i] = q_t · mean(K_i)        query t reads its own block and the others of highest s[t, i]

Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv 2502.13189, eqs.
5-6. A head chooses for itself. No gradient flows through the choice.

Shape letters: B batch, H query heads, G kv heads, T queries, D head size, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import BlockMeansConfig
from polyhead.layers.selectors.base import PooledSelector, register_selector


class BlockMeans(PooledSelector):
    """Chooses blocks by the product of a head's query with the mean of their keys."""

    def entries(self, k: Tensor) -> Tensor:
        precise = torch.promote_types(k.dtype, torch.float32)
        return k.mean(dim=3, dtype=precise).transpose(1, 2).flatten(2)

    def scores(self, q: Tensor, entries: Tensor) -> Tensor:
        (B, H, T, D), G = q.shape, self.heads.num_kv_heads
        precise = torch.promote_types(q.dtype, torch.float32)
        means = entries.to(precise).view(B, -1, G, D).permute(0, 2, 3, 1)
        products = q.to(precise).reshape(B, G, H // G * T, D) @ means
        return products.view(B, H, T, -1)


register_selector(BlockMeansConfig, BlockMeans)
