"""DeepSeek sparse attention: latent attention to the keys that a lightning indexer chooses.

    I[t, s] = Σ_j w[t, j] · relu(q'[t, j] · k'[s])     q' from the queries' latent, k' and w from x
    out[t]  = MLA of query t with the top_k keys s of highest I[t, s] among those that it sees

DeepSeek-V3.2 (2025), arXiv 2512.02556, eqs. 1-2. The indexer's keys are a memory of their own, of
one head. While a sequence has no more than ``top_k`` keys this is latent attention. An indexer may
choose pools of tokens instead (``pooled_indexer.py``); the layer is then causal by nature.

Shape letters: B batch, J heads of the indexer, T queries, S keys, D features of the indexer's keys,
E embed size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhead.config import (
    IndexerConfig,
    LatentAttentionConfig,
    RopeConfig,
    SparseLatentAttentionConfig,
)
from polyhead.errors import ConfigError
from polyhead.kernels.choosing import choose_keys
from polyhead.layers import fused
from polyhead.layers.attention_parts import check_layer_cache
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.hooks import Hooked
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.pooled_indexer import PooledIndexer
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import real_tokens
from polyhead.layers.registry import register_builder
from polyhead.layers.selectors.places import Places
from polyhead.semantics import DenseSource, KeyValueSource, Mask
from polyhead.semantics.argument_hints import other_names


class LightningIndexer(nn.Module):
    """Makes what ``choose_keys`` scores keys with.

    Args:
        embed_dim: E.
        query_dim: Features of the latent that queries are made from.
        config: Sizes and norm.
        rotated: Features of a query and of a key that are rotated.

    Attributes:
        q_proj: ``[J · D, query_dim]``.
        k_proj: ``[D, E]``.
        k_norm: Over the D features of a key.
        weights_proj: ``[J, E]``.
    """

    def __init__(self, embed_dim: int, query_dim: int, config: IndexerConfig, rotated: int) -> None:
        super().__init__()
        self.config, self.rotated = config, rotated
        J, D = config.num_heads, config.head_dim
        self.q_proj = nn.Linear(query_dim, J * D, bias=False)
        self.k_proj = nn.Linear(embed_dim, D, bias=False)
        self.k_norm = build_norm(D, config.norm)
        self.weights_proj = nn.Linear(embed_dim, J, bias=False)

    def forward(
        self, x: Tensor, latent: Tensor, rope: RoPE | None, positions: int | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, J, T, D]``, weights ``[B, J, T]`` and k ``[B, 1, T, D]``.

        Args:
            x: ``[B, T, E]``.
            latent: ``[B, T, query_dim]``.
            rope: Rotary positions.
            positions: Of the tokens, or of the first.
        """
        J, D = self.config.num_heads, self.config.head_dim
        q = linear(latent, self.q_proj).view(*x.shape[:2], J, D)
        k, weights = fused.linears(x, self.k_proj, self.weights_proj)
        k = self.k_norm(k).view(*x.shape[:2], 1, D)
        start = D - self.rotated if self.config.rotates == "last" else 0
        q, k = (
            _rotated(each, rope, positions, start, self.rotated).transpose(1, 2) for each in (q, k)
        )
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, weights.mT * (J * D) ** -0.5, k


class SparseLatentAttention(MultiHeadLatentAttention):
    """``MultiHeadLatentAttention`` to the keys that an indexer chooses.

    No gradient flows through the choice: ``polyhead.training.indexer_loss`` trains the indexer. A
    cache of it is a ``LayerCache`` of the layout's memories.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: Number of query heads H.
        q_lora_rank: Size of the latent that queries are made from, those of the indexer too.
        kv_lora_rank: As of ``MultiHeadLatentAttention``, like all that follow.
        qk_nope_head_dim: N.
        qk_rope_head_dim: P, which the indexer's queries and keys rotate too.
        v_head_dim: V.
        indexer: Sizes of the indexer, and how many keys it chooses.
        bias: Biases, of the latent attention.
        rope: Rotary positions; None: nothing is rotated.
        dropout: Dropout probability of the attention weights, when training.

    Attributes:
        indexer: A ``LightningIndexer``, a ``PooledIndexer`` where its configuration has pools, or
            None where the layer reads the selection of an earlier one.
        top_k: Keys that a query chooses.
        gate_proj: ``[H · V, E]`` or ``[H, E]``, or of ``q_b_proj``'s features, where the
            configuration says so.
        sinks: ``[H]``, or None.

    Raises:
        ConfigError: Sizes or numbers that do not go together.
    """

    _reads_query_latent = True
    config: SparseLatentAttentionConfig
    sinks: nn.Parameter | None

    @other_names
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        indexer: IndexerConfig = IndexerConfig(),  # noqa: B008  # frozen
        bias: bool = True,
        rope: RoPE | RopeConfig | None = RopeConfig(),  # noqa: B008  # frozen
        dropout: float = 0.0,
    ) -> None:
        Hooked.__init__(self)
        config = SparseLatentAttentionConfig(
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            bias=bias,
            rope=rope.config if isinstance(rope, RoPE) else rope,
            dropout=dropout,
            indexer=indexer,
        )
        self._build(embed_dim, config, rope if isinstance(rope, RoPE) else None)

    def _build(self, embed_dim: int, config: LatentAttentionConfig, rope: RoPE | None) -> None:
        if not isinstance(config, SparseLatentAttentionConfig) or config.q_lora_rank is None:
            raise ConfigError(f"config must be a SparseLatentAttentionConfig: got {config}")
        super()._build(embed_dim, config, rope)
        self.top_k = config.indexer.top_k
        H, read = config.num_heads, config.query_features
        if config.query_gate:
            self.q_b_proj = nn.Linear(read, H * config.qk_head_dim, bias=False)
        if config.gated or config.query_gate:
            into = read if config.query_gate else embed_dim
            self.gate_proj = nn.Linear(into, H * config.gate_dim, bias=False)
        self.register_parameter(
            "sinks", nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None
        )
        self.indexer: LightningIndexer | PooledIndexer | None = None
        if config.reads:
            return
        index, into = config.indexer, config.q_lora_rank
        if index.pool is not None:
            self.indexer = PooledIndexer(embed_dim, into, index)
        else:
            self.indexer = LightningIndexer(embed_dim, into, index, config.qk_rope_head_dim)

    def reset_parameters(self) -> None:
        """Sets the sinks to 0, as at first. Projections and norms stay."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def _sinks(self) -> Tensor | None:
        return self.sinks

    def _finished(self, x: Tensor, heads: Tensor, of_queries: Tensor) -> Tensor:
        if not (self.config.gated or self.config.query_gate):
            return heads
        gate = linear(of_queries if self.config.query_gate else x, self.gate_proj)
        if self.config.query_gate:  # in float32, as transformers' layer does
            gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        gate = torch.sigmoid(gate).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
        return (heads * gate).to(heads.dtype)

    def _query_latent(self, projected: Tensor) -> Tensor:
        normed = super()._query_latent(projected)
        return torch.cat((normed, projected), dim=-1) if self.config.query_gate else normed

    def _check_cache(self, cache: Any) -> None:
        if self.indexer is None:
            super()._check_cache(cache)
        else:
            check_layer_cache(cache)

    def _remembered(
        self,
        x: Tensor,
        latent: Tensor,
        of_queries: Tensor,
        mask: Mask | None,
        at: int | Tensor,
        positions: Tensor | None,
        cache: Any,
        handed: Handed | None,
    ) -> tuple[KeyValueSource, Mask | None]:
        if self.indexer is None:
            read = handed_to(handed, "selection", self.config.reads)
            held, mask = super()._remembered(
                x, latent, of_queries, mask, at, positions, cache, handed
            )
            return held, _both(mask, read)
        if isinstance(self.indexer, PooledIndexer):
            return self._pooled(self.indexer, x, latent, of_queries, mask, positions, cache, handed)
        with torch.no_grad():
            normed = of_queries[..., : self.config.q_lora_rank].detach()
            q, weights, k = self.indexer(x.detach(), normed, self.rope, at)
        values = latent[..., : self.config.kv_lora_rank]
        if cache is None:
            source: KeyValueSource = DenseSource(latent, values, positions)
            index: KeyValueSource = DenseSource(k, k, positions)
        else:
            with cache.step(x, positions) as step:
                source, index = step.append("kv", latent, values), step.append("index", k, k)
        chosen = None
        if source.tokens.length > self.top_k:
            chosen = choose_keys(q, weights, index, self.top_k, mask=mask, q_positions=positions)
        if handed is not None:
            handed.hand_on("selection", chosen)
        return source, _both(mask, chosen)

    def _pooled(
        self,
        indexer: PooledIndexer,
        x: Tensor,
        latent: Tensor,
        of_queries: Tensor,
        mask: Mask | None,
        positions: Tensor | None,
        cache: Any,
        handed: Handed | None,
    ) -> tuple[KeyValueSource, Mask | None]:
        """What ``_remembered`` gives where queries choose pools."""
        real_tokens(mask, x, positions, cached=cache is not None, what="attention to pools")
        values = latent[..., : self.config.kv_lora_rank]
        inputs = x.detach(), of_queries.detach()
        if cache is None:
            source: KeyValueSource = DenseSource(latent, values, positions)
            places = Places.of(x, source, positions)
            with torch.no_grad():
                chosen = indexer(*inputs, places, None, self.top_k)
        else:
            with cache.step(x, positions) as step, torch.no_grad():
                source = step.append("kv", latent, values)
                places = Places.of(x, source, positions, step.before or [0] * len(x))
                chosen = indexer(*inputs, places, step, self.top_k)
        if handed is not None:
            handed.hand_on("selection", chosen)
        return source, _both(mask, chosen)


def _both(mask: Mask | None, chosen: Mask | None) -> Mask | None:
    """Keys that a mask shows and that were chosen; None: all."""
    if mask is None or chosen is None:
        return chosen if mask is None else mask
    return mask & chosen


def _rotated(x: Tensor, rope: RoPE | None, positions: int | Tensor, start: int, dim: int) -> Tensor:
    """``[B, T, heads, D]`` with ``dim`` of its features rotated, from ``start`` on."""
    if rope is None:
        return x
    before, turned, behind = x.tensor_split([start, start + dim], dim=-1)
    rotated = rope.apply(turned, positions, head_axis=2)
    return torch.cat((before, rotated, behind), dim=-1)


register_builder(SparseLatentAttentionConfig, SparseLatentAttention.from_config)
