"""Attention within a window and to the sums of blocks of tokens (transient global attention).

    out_i = Attention(x_i Wq, [x_N; s] Wk, [x_N; s] Wv)        N: the window of token i
    s_b   = norm(Σ x_j, j in block b)

Guo et al. 2022, "LongT5". Window and sums are two sets of keys. A block that is not whole
makes no sum; its tokens are added to the sum before, and stand at its place.

Shape letters: B batch, H query heads, T tokens, n blocks, V value size, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, BlockSumsAttentionConfig
from polyhead.config.block_sums import SUMS_BIAS
from polyhead.layers import fused
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import (
    KeySet,
    SparseEncoderAttention,
    attend_key_sets,
    both,
    lengths_of_rows,
)
from polyhead.semantics import Bias, DenseSource, KeyLengths, RelativeBias, Window


class BlockSumsAttention(SparseEncoderAttention):
    """``MultiHeadAttention`` of an encoder's window and of sums of blocks; built from its config.

    Attributes:
        sums_norm: Over the sums.
        sums_bias: ``[num_buckets, H]``, or None where an earlier layer hands it on.
    """

    config_class: ClassVar[type[AttentionConfig]] = BlockSumsAttentionConfig
    config: BlockSumsAttentionConfig
    sums_bias: nn.Parameter | None
    takes_bias = True

    def _add_modules(self) -> None:
        config = self.config
        self.sums_norm = build_norm(self.embed_dim, config.sums_norm)
        table = None
        if config.sums_bias_of is None:
            table = nn.Parameter(torch.empty(config.sums_bias.num_buckets, self.num_heads))
        self.register_parameter("sums_bias", table)
        assert config.window is not None  # the configuration says so
        self._band = Window(config.window, config.window_ahead)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table of sums: normal with standard deviation 0.02."""
        if self.sums_bias is not None:
            nn.init.normal_(self.sums_bias, std=0.02)

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        table = self._table(handed)
        q, k, v = self._project(x, 0)
        source, inside = DenseSource(k, v), both(self._band, mask)
        size, T = self.config.block_size, x.shape[1]
        if size > T:
            return self._attend(q, source, mask=inside, bias=bias, **options)
        lengths = lengths_of_rows(mask, x)
        whole, places = lengths // size, torch.arange(T, device=x.device)
        # Padding, and all of a row without a whole block, is in a block behind the last.
        blocks = torch.minimum(places // size, whole[:, None] - 1)
        at = blocks.masked_fill((places >= lengths[:, None]) | (blocks < 0), T // size)
        sums = x.new_zeros(len(x), T // size + 1, x.shape[2])
        sums = sums.scatter_add(1, at[..., None].expand_as(x), x)[:, :-1]
        made = fused.linears(self.sums_norm(sums), self.k_proj, self.v_proj)
        k, v = (y.view(*y.shape[:2], self.num_kv_heads, -1).transpose(1, 2) for y in made)
        sets = (
            KeySet(source, inside, bias),
            KeySet(DenseSource(k, v), KeyLengths(whole), table, blocks),
        )
        return attend_key_sets(self, q, sets, **options)

    def _table(self, handed: Handed | None) -> RelativeBias:
        if self.sums_bias is None:
            table: RelativeBias = handed_to(handed, SUMS_BIAS, self.config.reads)
            return table
        own = RelativeBias(self.sums_bias, max_distance=self.config.sums_bias.max_distance)
        if handed is not None:
            handed.hand_on(SUMS_BIAS, own)
        return own


register_builder(BlockSumsAttentionConfig, BlockSumsAttention.from_config)
