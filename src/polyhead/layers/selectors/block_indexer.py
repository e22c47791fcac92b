"""MiniMax-M3's indexer: blocks are chosen by the best of their keys.

    s[t, i] = max_{j in block i} q'_t · k'_j        q' and k' from x, normed and rotated

MiniMax-M3 (2026), by transformers' code. A head of the indexer chooses for the query heads of its
group. No gradient flows through the choice.

Shape letters: B batch, J heads of the indexer, T queries, S keys, D its features, N blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.config import BlockIndexerConfig
from polyhead.layers.linear import linear
from polyhead.layers.selectors.base import Choice, ProjectedSelector, best_blocks, register_selector
from polyhead.semantics import Chosen, DenseSource, KeyValueSource


class BlockIndexer(ProjectedSelector):
    """Chooses blocks by the greatest product of a query and a key of its own."""

    config: BlockIndexerConfig

    @torch.no_grad()
    def forward(self, call: Choice) -> Chosen | None:
        config, places, J = self.config, call.places, self.config.num_heads
        k = self.k_norm(linear(call.x, self.k_proj)[:, :, None])
        k = self._rotated(k, call.positions, call.rope).transpose(1, 2)
        if call.step is None:
            source: KeyValueSource = DenseSource(k, k)
        else:
            source = call.step.append("index", k, k)
        if max(places.after) <= config.most_keys:
            return None
        q = linear(call.x, self.q_proj).view(*call.x.shape[:2], J, config.head_dim)
        q = self._rotated(self.q_norm(q), call.positions, call.rope).transpose(1, 2)
        precise = torch.promote_types(q.dtype, torch.float32)
        keys = source.gather()[0][:, 0]
        if places.keys is not None:
            index = places.keys.to(keys.device)[..., None].expand_as(keys)
            keys = keys.gather(1, index)
        keys = keys.to(precise).mT[:, None]  # [B, 1, D, S]
        S, size = keys.shape[-1], config.size

        def scores(run: slice) -> Tensor:
            # Later keys of a query's own block change nothing: that block is always chosen.
            products = q[:, :, run].to(precise) @ keys
            products = F.pad(products, (0, -S % size), value=-torch.inf)
            return products.view(*products.shape[:-1], -1, size).amax(dim=-1)

        blocks = best_blocks(
            scores, places, config.top_k, size, J, last=config.last_blocks, per_query=J * S
        )
        return places.seen(blocks, size, self.heads.num_heads // J)


register_selector(BlockIndexerConfig, BlockIndexer)
