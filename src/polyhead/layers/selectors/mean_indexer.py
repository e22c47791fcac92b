"""Qwen4-Exp's indexer: whole blocks are chosen by the mean of their keys.

    c_i     = rope(norm(mean(K'_i)))        at the first token of block i
    s[t, i] = Σ_j relu(q'_tj · c_i)         q' and K' from x, q' normed and rotated

All heads read the whole blocks of highest s[t, i] and the tokens behind the last whole one, by
transformers' code. No gradient flows through the choice.

Shape letters: B batch, J heads of the indexer, T queries, m tokens of a block, n new blocks,
D features of a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import MeanIndexerConfig
from polyhead.layers import fused
from polyhead.layers.selectors.base import Choice, ProjectedSelector, register_selector
from polyhead.layers.selectors.pools import choose_blocks, whole_block_entries
from polyhead.semantics import Chosen


class MeanIndexer(ProjectedSelector):
    """Chooses whole blocks by the products of queries of its own with one key for each."""

    config: MeanIndexerConfig

    @torch.no_grad()
    def forward(self, call: Choice) -> Chosen | None:
        c, places = self.config, call.places
        q, k = fused.linears(call.x, self.q_proj, self.k_proj)

        def entries(pools: Tensor) -> Tensor:
            precise = torch.promote_types(pools.dtype, torch.float32)
            means = self.k_norm(pools.mean(dim=2, dtype=precise).to(pools.dtype))
            at = _first_positions(call, c.size, means.shape[1])
            return self._rotated(means[:, :, None], at, call.rope)[:, :, 0]

        held = whole_block_entries(k, places, call.step, c.size, c.head_dim, entries)
        if max(places.after) // c.size <= c.top_k:
            return None
        q = self.q_norm(q.view(*call.x.shape[:2], c.num_heads, c.head_dim))
        q = self._rotated(q, call.positions, call.rope).transpose(1, 2)
        precise = torch.promote_types(q.dtype, torch.float32)
        weights = torch.ones(q.shape[:3], dtype=precise, device=q.device)
        return choose_blocks(q, weights, held, places, c.size, c.top_k, self.heads.num_heads)


def _first_positions(call: Choice, size: int, count: int) -> Tensor:
    """``[B, n]`` positions of the first tokens of the blocks that new tokens complete."""
    places, positions = call.places, call.source.tokens.position_tensor(call.x.device)
    positions = positions.expand(len(call.x), -1)
    if places.keys is not None:
        positions = positions.gather(1, places.keys.to(positions.device))
    first = torch.tensor(places.before, device=positions.device) // size
    index = (first[:, None] + torch.arange(count, device=positions.device)) * size
    return positions.gather(1, index.clamp(max=positions.shape[1] - 1)).clamp(min=0)


register_selector(MeanIndexerConfig, MeanIndexer)
