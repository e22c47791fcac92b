"""Quest: blocks are chosen by the greatest product that one of their keys could have.

    s[t, i] = Σ_d max(q_td · max_j K_ijd, q_td · min_j K_ijd)  ≥  max_j q_t · K_ij

Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv
2406.10774, Algorithm 1. The keys are those that a trained model has.

Shape letters: B batch, H query heads, G kv heads, T queries, D head size, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import BlockBoundsConfig
from polyhead.layers.gemm import code_for
from polyhead.layers.selectors.base import Choice, PooledSelector, register_selector


class BlockBounds(PooledSelector):
    """Chooses blocks by the bound that their keys' features set to products with a query."""

    config: BlockBoundsConfig

    def reads_all(self, call: Choice) -> bool:
        return call.x.shape[1] > self.config.max_queries

    def entries(self, k: Tensor) -> Tensor:
        return bounds(k)

    def choose(self, call: Choice, entries: Tensor) -> Tensor:
        q = call.q.detach()
        code = code_for(q) if self.config.shared else None
        if code is None or q.stride(-1) != 1 or entries.dtype != q.dtype:
            return super().choose(call, entries)
        own = call.places.queries.div(self.config.size, rounding_mode="floor")
        own = own.reshape(-1, q.shape[2])
        return code.choose_blocks(q, entries, own, self.config.top_k, self.heads.num_kv_heads)

    def scores(self, q: Tensor, entries: Tensor) -> Tensor:
        (B, H, T, D), G = q.shape, self.heads.num_kv_heads
        precise = torch.promote_types(q.dtype, torch.float32)
        bounds = entries.to(precise).view(B, -1, G, 2 * D).permute(0, 2, 3, 1)
        q = q.to(precise).reshape(B, G, H // G, T, D)
        signs = torch.cat((q.clamp(min=0), q.clamp(max=0)), dim=-1)
        if self.config.shared:
            return signs.sum(dim=2) @ bounds
        return (signs.flatten(2, 3) @ bounds).view(B, H, T, -1)


def bounds(k: Tensor) -> Tensor:
    """``[B, n, 2 G D]``: of each kv head the greatest features of n blocks' keys, then the least.

    Args:
        k: ``[B, G, n, size, D]``.
    """
    return torch.cat((k.amax(dim=3), k.amin(dim=3)), dim=-1).transpose(1, 2).flatten(2)


register_selector(BlockBoundsConfig, BlockBounds)
