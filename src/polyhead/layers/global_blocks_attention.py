"""Attention within neighbouring blocks, where the first and the last block are global.

    out_i = Attention(q_i, k_N, v_N)        N: blocks b − 1, b, b + 1 of the token's block b, the
                                            first and the last; of their own tokens: all

Zaheer et al. 2020, "BigBird". What training draws at random is the first block in evaluation, as in
transformers: its keys then count several times. It is so here in training too.

Shape letters: B batch, H query heads, T tokens, V value size, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from polyhead.config import AttentionConfig, GlobalBlocksAttentionConfig
from polyhead.layers.handed import Handed
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import (
    KeySet,
    SparseEncoderAttention,
    attend_key_sets,
    both,
    lengths_of_rows,
)
from polyhead.semantics import Bias, BlockSparse, DenseSource, Keep, KeyLengths


class GlobalBlocksAttention(SparseEncoderAttention):
    """``MultiHeadAttention`` to neighbouring and global blocks of tokens; built from its config."""

    config_class: ClassVar[type[AttentionConfig]] = GlobalBlocksAttentionConfig
    config: GlobalBlocksAttentionConfig

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        q, k, v = self._project(x, 0)
        T, size, again = x.shape[1], self.config.block_size, self.config.first_again
        if self.config.most_seen_whole >= T:
            return self._attend(q, DenseSource(k, v), mask=mask, **options)
        at = torch.arange(-(-T // size), device=x.device)
        ends = (at == 0) | (at == at[-1])
        seen = ((at[:, None] - at).abs() <= 1) | ends | ends[:, None]
        near = KeySet(DenseSource(k, v), both(BlockSparse(seen, size), mask))
        if not again:
            return self._attend(q, near.source, mask=near.mask, **options)
        between = (~ends).repeat_interleave(size)[:T]
        first = DenseSource(k[:, :, :size], v[:, :, :size])
        real = None if mask is None else KeyLengths(lengths_of_rows(mask, x).clamp(max=size))
        more = KeySet(first, both(Keep(between[:, None]), real), times=again)
        return attend_key_sets(self, q, (near, more), **options)


register_builder(GlobalBlocksAttentionConfig, GlobalBlocksAttention.from_config)
