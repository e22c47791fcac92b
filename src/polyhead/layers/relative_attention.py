"""Attention with sinusoids of distances and with segments (Transformer-XL, XLNet).

    score_ij = ((q_i + u) · k_j + (q_i + v) · (R_(i−j) Wr) + (q_i + w) · s_ij) · scale

R_n are the sinusoids of distance n, u, v and w learned biases of each head, and s_ij is one vector
where i and j are of one segment, and another where they are not. A call without segments has no
such term. Dai et al. 2019, "Transformer-XL"; Yang et al. 2019, "XLNet".

Shape letters: B batch, H query heads, G kv heads, T tokens, D head size, n distances.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, RelativeAttentionConfig, SinusoidConfig
from polyhead.config.layout import SEGMENTS
from polyhead.errors import UnsupportedError
from polyhead.layers.disentangled_attention import DisentangledAttention
from polyhead.layers.fused import dropped
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.positions import SinusoidalPositions
from polyhead.layers.registry import register_builder
from polyhead.semantics import RelativeContentBias


class RelativeAttention(DisentangledAttention):
    """``MultiHeadAttention`` of an encoder that also scores distances and segments.

    Built from its config, and called within its model, which hands it the segments of the call.
    With segments, keys stand where their places say: ``positions`` are refused.

    Attributes:
        distance_proj: Wr.
        content_bias, distance_bias, segment_bias: ``[H, D]``, u, v and w.
        segments: ``[2, H, D]``, for keys of the query's own segment and of others.
    """

    config_class: ClassVar[type[AttentionConfig]] = RelativeAttentionConfig
    config: RelativeAttentionConfig  # type: ignore[assignment]

    def _add_modules(self) -> None:
        H, D = self.num_heads, self.head_dim
        self.distance_proj = nn.Linear(self.embed_dim, H * D, bias=False)
        self.sinusoids = SinusoidalPositions(self.embed_dim, SinusoidConfig("halves"))
        self.content_bias = nn.Parameter(torch.empty(H, D))
        self.distance_bias = nn.Parameter(torch.empty(H, D))
        self.segment_bias = nn.Parameter(torch.empty(H, D))
        self.segments = nn.Parameter(torch.empty(2, H, D))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws biases and segments: normal with standard deviation 0.02."""
        for x in (self.content_bias, self.distance_bias, self.segment_bias, self.segments):
            nn.init.normal_(x, std=0.02)

    def _scored(
        self, q: Tensor, k: Tensor, positions: Tensor | None, handed: Handed | None
    ) -> tuple[Tensor, RelativeContentBias]:
        segments = handed_to(handed, SEGMENTS, self.config.reads)
        if positions is not None and segments is not None:
            raise UnsupportedError(
                f"{type(self).__name__} tells segments by places: got segments and positions"
            )
        far, most = q.shape[2] - 1, self.config.max_distance
        if positions is not None:
            far = int((positions.amax(dim=-1) - positions.amin(dim=-1)).max())
        if most is not None and segments is None:
            far = min(far, most)  # those beyond share the outer columns
        apart = torch.arange(-far, far + 1, device=q.device)
        vectors = self.sinusoids(
            apart if most is None else apart.clamp(-most, most), len(apart), q.dtype
        )
        if self.training and self.dropout:
            vectors = dropped(vectors, self.dropout)
        columns = linear(vectors, self.distance_proj).view(len(apart), -1, self.head_dim)
        table = self._table_of(q, self.distance_bias, columns)
        if segments is not None:
            kinds = self._table_of(q, self.segment_bias, self.segments)
            places = torch.arange(q.shape[2], device=q.device)
            of_keys = (places[:, None] - apart).clamp(0, q.shape[2] - 1)
            differ = segments[:, :, None] != segments[:, of_keys]
            table = table + torch.where(differ[:, None], kinds[..., 1:], kinds[..., :1])
        return q + self.content_bias[:, None], RelativeContentBias(table)

    def _table_of(self, q: Tensor, bias: Tensor, vectors: Tensor) -> Tensor:
        """``[B, H, T, n]`` scores of queries with vectors ``[n, H, D]``."""
        return (q + bias[:, None]) * self.scale @ vectors.permute(1, 2, 0)


register_builder(RelativeAttentionConfig, RelativeAttention.from_config)
