"""Heads beside as many convolutions whose weights depend on the text.

    out  = concat(Attention(q_1, k_1, v_1), …, c_1, …) Wo
    c_t  = Σ_j softmax(w_t)_j u_(t+j)        u = x Wu, j: tokens around t
    w    = (convolution(x) ∘ q) Ww           as many weights for each head as tokens are seen

Jiang et al. 2020, "ConvBERT" (arXiv 2008.02496), §3: span-based dynamic convolution. Padding counts
as zeros, so that a text has the result that it has alone.

Shape letters: B batch, H heads, T tokens, D head size, W width, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AttentionConfig, ConvolvedHeadsConfig
from polyhead.layers import fused
from polyhead.layers.handed import Handed
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import SparseEncoderAttention, lengths_of_rows
from polyhead.semantics import Bias, DenseSource, KeyLengths


class ConvolvedHeads(SparseEncoderAttention):
    """``MultiHeadAttention`` with a convolution beside each head; built from its config.

    Attributes:
        depthwise: Convolves each feature of the input by itself.
        pointwise: What queries are multiplied by, made of that.
        weights_proj: Makes the convolutions' weights of the product.
        convolved_proj: Makes what is convolved.
    """

    config_class: ClassVar[type[AttentionConfig]] = ConvolvedHeadsConfig
    config: ConvolvedHeadsConfig

    def _add_modules(self) -> None:
        E, width = self.embed_dim, self.config.width
        inner = self.num_heads * self.head_dim
        self.o_proj = nn.Linear(2 * inner, E, bias=self.config.out_bias)
        self.depthwise = nn.Conv1d(E, E, width, padding=width // 2, groups=E, bias=False)
        self.pointwise = nn.Linear(E, inner)
        self.weights_proj = nn.Linear(inner, self.num_heads * width)
        self.convolved_proj = nn.Linear(E, inner)

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        q, k, v = fused.linears(x, self.q_proj, self.k_proj, self.v_proj)
        beside = self._convolved(x, q, mask)
        q, k = self._queries(q, 0), self._placed(k, self.num_kv_heads, "k_norm", 0)
        heads = self._attend(q, DenseSource(k, self._values(v)), mask=mask, **options)
        return torch.cat((heads, beside), dim=1)

    def _convolved(self, x: Tensor, q: Tensor, mask: KeyLengths | None) -> Tensor:
        """``[B, H, T, D]``; ``q [B, T, H · D]`` as it is projected."""
        B, T, _ = x.shape
        H, D, width = self.num_heads, self.head_dim, self.config.width
        made = linear(x, self.convolved_proj)
        if mask is not None:
            padding = torch.arange(T, device=x.device) >= lengths_of_rows(mask, x)[:, None]
            x, made = (each.masked_fill(padding[..., None], 0.0) for each in (x, made))
        near = linear(self.depthwise(x.mT).mT, self.pointwise)
        weights = linear(near * q, self.weights_proj).view(B, T, H, width).softmax(dim=-1)
        spans = F.pad(made, (0, 0, width // 2, width // 2)).unfold(1, width, 1)
        mixed = spans.reshape(B, T, H, D, width) @ weights[..., None]
        return mixed.squeeze(-1).transpose(1, 2)


register_builder(ConvolvedHeadsConfig, ConvolvedHeads.from_config)
