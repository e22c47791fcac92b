"""What makes keys of blocks of tokens, and chooses blocks, for ``CompressedAttention``.

    c_i = norm(Σ_j p_j k'_j),  p = softmax_j(g_j + e_j) for each feature       j in block i

Its module has the whole formula.

Shape letters: B batch, J heads of the indexer, T queries, N blocks, n new ones, l tokens that a
block is made of, m tokens of a block, D features of a key, W width of what blocks are made of,
E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.config import CompressedAttentionConfig, IndexerConfig
from polyhead.kernels.choosing import choose_keys
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.selectors.places import Places, pooled_blocks, source_of
from polyhead.semantics import Causal, Chosen


class BlockPooling(nn.Module):
    """Makes one key of each block of tokens.

    Args:
        embed_dim: E.
        size: Features D of a key.
        config: Tokens of a block, and whether blocks overlap.

    Attributes:
        kv_proj: ``[D, E]``, or ``[2 · D, E]``: k' for the next block, then for the token's own.
        gate_proj: The same of g.
        positions: ``[m, D]`` or ``[m, 2 · D]`` e.
        norm: Over the D features of a key.
    """

    def __init__(self, embed_dim: int, size: int, config: CompressedAttentionConfig) -> None:
        super().__init__()
        self.config, self.size = config, size
        width = 2 * size if config.overlap else size
        self.kv_proj = nn.Linear(embed_dim, width, bias=False)
        self.gate_proj = nn.Linear(embed_dim, width, bias=False)
        self.positions = nn.Parameter(torch.zeros(config.block_size or 0, width))
        self.norm = build_norm(size, config.norm)

    def reset_parameters(self) -> None:
        """Sets the positions to 0, as at first. Projections and norms stay."""
        nn.init.zeros_(self.positions)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, W]``, what blocks are made of: k' and g."""
        return torch.cat((linear(x, self.kv_proj), linear(x, self.gate_proj)), dim=-1)

    def entries(self, tail: Tensor, places: Places, rope: RoPE | None) -> Tensor:
        """``[B, n, D]`` the blocks that new tokens complete, rotated by the place of their first.

        Args:
            tail: ``[B, l − 1 + T, W]``, the new tokens behind the last ones before them.
            places: Where the tokens stand.
            rope: Rotary positions.
        """
        m, D = self.config.block_size or 0, self.size
        blocks = pooled_blocks(tail, places, self.config.span, m)
        if not blocks.shape[1]:
            return tail.new_zeros(len(tail), 0, D)
        first = torch.tensor([had // m for had in places.before], device=tail.device)
        number = first[:, None] + torch.arange(blocks.shape[1], device=tail.device)
        precise = torch.promote_types(tail.dtype, torch.float32)
        k, gates = blocks.to(precise).chunk(2, dim=-1)
        placed = self.positions.to(precise)
        if self.config.overlap:
            k = torch.cat((k[:, :, :m, :D], k[:, :, m:, D:]), dim=2)
            gates = torch.cat((gates[:, :, :m, :D], gates[:, :, m:, D:]), dim=2)
            gates = gates + torch.cat((placed[:, :D], placed[:, D:]))
            within = torch.arange(2 * m, device=tail.device) >= m
            there = within | (number > 0)[..., None]  # no block comes before the first
            gates = gates.masked_fill(~there[..., None], -torch.inf)
        else:
            gates = gates + placed
        made = self.norm((k * gates.softmax(dim=2)).sum(dim=2).to(tail.dtype))
        return apply_rope(made[:, :, None], rope, number * m, self.config.rotated)[:, :, 0]


class BlockIndexing(nn.Module):
    """Makes what ``choose_keys`` scores blocks with.

    Args:
        embed_dim: E.
        config: Of the layer.
        index: Of the indexer.

    Attributes:
        q_proj: ``[J · D, q_lora_rank]``.
        weights_proj: ``[J, E]``.
        pooling: Makes its keys of blocks.
    """

    def __init__(
        self, embed_dim: int, config: CompressedAttentionConfig, index: IndexerConfig
    ) -> None:
        super().__init__()
        self.config, self.index = config, index
        J, D = index.num_heads, index.head_dim
        self.q_proj = nn.Linear(config.q_lora_rank, J * D, bias=False)
        self.weights_proj = nn.Linear(embed_dim, J, bias=False)
        self.pooling = BlockPooling(embed_dim, D, config)

    def chosen(
        self,
        x: Tensor,
        latent: Tensor,
        entries: Tensor,
        places: Places,
        rope: RoPE | None,
        at: int | Tensor,
    ) -> Chosen | None:
        """The blocks that queries read; None: all.

        Args:
            x: ``[B, T, E]``.
            latent: ``[B, T, q_lora_rank]``.
            entries: ``[B, N, D]`` of blocks.
            places: Where queries stand.
            rope: Rotary positions.
            at: Positions of the tokens, or of the first.
        """
        J, D = self.index.num_heads, self.index.head_dim
        if entries.shape[1] <= self.index.top_k:
            return None
        q = linear(latent, self.q_proj).view(*x.shape[:2], J, D)
        q = apply_rope(q, rope, at, self.config.rotated).transpose(1, 2)
        weights = linear(x, self.weights_proj)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        source = source_of(entries, self.config.block_size or 0)
        return choose_keys(
            q,
            weights.mT * (J * D) ** -0.5,
            source,
            self.index.top_k,
            mask=Causal(),
            q_positions=places.queries,
        )


def apply_rope(
    x: Tensor, rope: RoPE | None, positions: int | Tensor, count: int, *, back: bool = False
) -> Tensor:
    """``[B, T, heads, D]`` with its last ``count`` features rotated, or rotated back.

    Args:
        x: ``[B, T, heads, D]``.
        rope: Rotary positions over ``count`` features; None: nothing is rotated.
        positions: ``[T]`` or ``[B, T]``, or the first token's.
        count: Features that are rotated.
        back: Whether by the opposite angle.
    """
    if rope is None:
        return x
    plain, last = x[..., : x.shape[-1] - count], x[..., x.shape[-1] - count :]
    if back:  # with its halves swapped, a pair is rotated the other way
        last = last.roll(count // 2, -1)
    last = rope.apply(last, positions, head_axis=2)
    return torch.cat((plain, last.roll(count // 2, -1) if back else last), dim=-1)
