"""An indexer that chooses pools of tokens by one key for each (GLM-5.3, 2026).

    c_i     = Σ_j p_j k'_j,  p = softmax_j(g_j + e_j) for each feature      j in pool i
    I[t, i] = Σ_j w[t, j] · relu(q'[t, j] · c_i)

k' and g are made of x, e is learned for each place in a pool. A query chooses among the whole pools
up to itself; it sees the tokens behind the last of them too. Nothing is rotated.

Shape letters: B batch, J heads of the indexer, T queries, m tokens of a pool, n new pools,
D features of a key, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import IndexerConfig
from polyhead.layers import fused
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.selectors.places import Places
from polyhead.layers.selectors.pools import choose_blocks, whole_block_entries
from polyhead.semantics import Chosen


class PooledIndexer(nn.Module):
    """Chooses pools of tokens.

    Args:
        embed_dim: E.
        query_dim: Features of the latent that queries are made from.
        config: Sizes, norm and tokens of a pool.

    Attributes:
        q_proj: ``[J · D, query_dim]``.
        k_proj: ``[D, E]``.
        k_norm: Over the D features of k'.
        weights_proj: ``[J, E]``.
        gate_proj: ``[D, E]``.
        positions: ``[m, D]`` e.
    """

    def __init__(self, embed_dim: int, query_dim: int, config: IndexerConfig) -> None:
        super().__init__()
        self.config, self.pool = config, config.pool or 1
        J, D = config.num_heads, config.head_dim
        self.q_proj = nn.Linear(query_dim, J * D, bias=False)
        self.k_proj = nn.Linear(embed_dim, D, bias=False)
        self.k_norm = build_norm(D, config.norm)
        self.weights_proj = nn.Linear(embed_dim, J, bias=False)
        self.gate_proj = nn.Linear(embed_dim, D, bias=False)
        self.positions = nn.Parameter(torch.zeros(self.pool, D))

    def reset_parameters(self) -> None:
        """Sets the positions to 0, as at first. Projections and norms stay."""
        nn.init.zeros_(self.positions)

    def forward(
        self, x: Tensor, latent: Tensor, places: Places, step: Step | None, top_k: int
    ) -> Chosen | None:
        """The keys that queries read up to themselves; None: all.

        Args:
            x: ``[B, T, E]``.
            latent: ``[B, T, query_dim]``.
            places: Where queries and keys stand.
            step: Of the layer's cache; None: there is none.
            top_k: Keys of the pools that a query chooses.
        """
        J, D, m = self.config.num_heads, self.config.head_dim, self.pool
        k, gates, weights = fused.linears(x, self.k_proj, self.gate_proj, self.weights_proj)
        made = torch.cat((self.k_norm(k), gates), dim=-1)
        entries = whole_block_entries(made, places, step, m, D, self._entries)
        if max(places.after) // m <= top_k // m:
            return None
        q = linear(latent, self.q_proj).view(*x.shape[:2], J, D).transpose(1, 2)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        weights = weights.mT * (J * D) ** -0.5
        return choose_blocks(q, weights, entries, places, m, top_k // m, 1)

    def _entries(self, pools: Tensor) -> Tensor:
        """``[B, n, D]`` keys of new pools ``[B, n, m, 2 · D]``."""
        precise = torch.promote_types(pools.dtype, torch.float32)
        k, gates = pools.to(precise).chunk(2, dim=-1)
        weights = (gates + self.positions.to(precise)).softmax(dim=2)
        return (k * weights).sum(dim=2).to(pools.dtype)
