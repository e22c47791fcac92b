"""Attention of a funnel: queries may be of pairs of tokens, and keys of single ones.

    score_ij = ((q_i + u) · k_j + (q_i + v) · (R_n Wr) + (q_i + w) · s_ij) · scale

n is how far query i stands from key j in the text, R_n its sinusoids, s_ij one vector where i and j
are of one segment and another where they are not. The last two terms may be left out for the first
token. Dai et al. 2020, "Funnel-Transformer" (arXiv 2006.03236), A.2: its two formulas of the
second term, by shifting and factorized, are equal.

Shape letters: B batch, H heads, T queries, S keys, D head size, n distances.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, FunnelAttentionConfig
from polyhead.config.layout import SEGMENTS
from polyhead.layers.fused import dropped
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.layers.relative_attention import RelativeAttention
from polyhead.layers.sparse_encoder import SparseEncoderAttention
from polyhead.semantics import Bias, DenseSource, KeyLengths

OF_BOTH = 2
"""The segment whose tokens are of one segment with all."""


class Level(NamedTuple):
    """What a funnel hands to a layer.

    Attributes:
        segments: ``[B, T]`` of the queries.
        key_segments: ``[B, S]`` of the keys.
        keys: ``[B, S, E]`` what keys and values are made of; None: what the layer reads.
        stride: Tokens of the text from one key to the next.
        first_apart: As of ``FunnelConfig``.
    """

    segments: Tensor
    key_segments: Tensor
    keys: Tensor | None
    stride: int
    first_apart: bool


class FunnelAttention(SparseEncoderAttention, RelativeAttention):
    """``RelativeAttention`` of a funnel's layers, built from its config and called within a funnel.

    The call hands it a ``Level`` in place of segments.
    """

    config_class: ClassVar[type[AttentionConfig]] = FunnelAttentionConfig
    config: FunnelAttentionConfig

    def _add_modules(self) -> None:
        super()._add_modules()
        self.v_proj = nn.Linear(self.embed_dim, self.num_kv_heads * self.v_head_dim)

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        level: Level = handed_to(handed, SEGMENTS, self.config.reads)
        read = x if level.keys is None else level.keys
        q = self._queries(linear(x, self.q_proj), 0)
        k = self._placed(linear(read, self.k_proj), self.num_kv_heads, "k_norm", 0)
        source = DenseSource(k, self._values(linear(read, self.v_proj)))
        added, q = self._added(q, k.shape[2], level), q + self.content_bias[:, None]
        return self._attend(q, source, mask=mask, bias=added, **options)

    def _added(self, q: Tensor, keys: int, level: Level) -> Tensor:
        """``[B, H, T, S]`` what distances and segments add to the scores."""
        T, ratio = q.shape[2], 1 if level.keys is None else 2
        i = ratio * torch.arange(T, device=q.device)
        if level.first_apart:
            i = i + 1 - ratio  # pairs end at even places: (1, 2), (3, 4), …
        apart = i[:, None] - torch.arange(keys, device=q.device)
        far = max(ratio * T, keys)
        steps = torch.arange(-far, far + 1, device=q.device) * level.stride
        vectors = self.sinusoids(steps, len(steps), q.dtype)
        if self.training and self.dropout:
            vectors = dropped(vectors, self.dropout)
        columns = linear(vectors, self.distance_proj).view(len(steps), -1, self.head_dim)
        table = self._table_of(q, self.distance_bias, columns)
        near = table.gather(3, (apart + far).expand(*table.shape[:2], T, keys))
        kinds = self._table_of(q, self.segment_bias, self.segments)
        ours, theirs = level.segments[:, :, None], level.key_segments[:, None]
        same = (ours == theirs) | (ours == OF_BOTH) | (theirs == OF_BOTH)
        near = near + torch.where(same[:, None], kinds[..., :1], kinds[..., 1:])
        if level.first_apart:
            first = torch.zeros(T, keys, dtype=torch.bool, device=q.device)
            first[0], first[:, 0] = True, True
            near = near.masked_fill(first, 0.0)
        return near


register_builder(FunnelAttentionConfig, FunnelAttention.from_config)
