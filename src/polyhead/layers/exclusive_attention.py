"""Exclusive self-attention: what heads give, without what lies along a token's own value.

    out = concat(y_1 … y_H) ∘ sigmoid(n Wg) Wo        y = h − tanh(α) (h · v̂) v̂
    h   = Attention(n Wq, n Wk, v)        v = n Wv + table[id]        n = norm(a x + b e)

v̂ is the value of the query's own token, of length 1, e is what the embedding gives, and α is a
number for each head. The table is for some layers, a and b may be left out. Zhai 2026, "Exclusive
self attention" (arXiv 2603.09078); Zhou et al. 2024, "Value residual learning" (arXiv 2410.17897),
whose values come from the first layer; NeoMME.

Shape letters: B batch, H query heads, G kv heads, T tokens, V value size, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AttentionConfig, ExclusiveAttentionConfig
from polyhead.config.layout import EMBEDDED, TOKENS
from polyhead.layers.gated_attention import GatedAttention
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import SparseEncoderAttention
from polyhead.semantics import Bias, DenseSource, KeyLengths


class ExclusiveAttention(SparseEncoderAttention, GatedAttention):
    """``GatedAttention`` of an encoder, made from its data.

    The model hands it what its configuration reads: ids, or what the embedding gives.

    Attributes:
        exclusion: ``[H]`` α, at first 0.
        mix: ``[2]`` a and b, at first 1 and 0, where there is a ``mix_norm``.
        value_table: ``[value_vocab_size, G · V]``, or absent.
    """

    config_class: ClassVar[type[AttentionConfig]] = ExclusiveAttentionConfig
    config: ExclusiveAttentionConfig

    def _add_modules(self) -> None:
        super()._add_modules()
        config = self.config
        self.exclusion = nn.Parameter(torch.zeros(self.num_heads))
        if config.mix_norm is not None:
            self.mix = nn.Parameter(torch.tensor([1.0, 0.0]))
            self.mix_norm = build_norm(self.embed_dim, config.mix_norm)
        if config.value_vocab_size is not None:
            row = self.num_kv_heads * self.v_head_dim
            self.value_table = nn.Embedding(config.value_vocab_size, row)

    def reset_parameters(self) -> None:
        """Sets α to 0, and a and b to 1 and 0. Projections, norms and the table stay."""
        super().reset_parameters()
        nn.init.zeros_(self.exclusion)
        if self.config.mix_norm is not None:
            with torch.no_grad():
                self.mix.copy_(torch.tensor([1.0, 0.0]))

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        if self.config.mix_norm is not None:
            embedded = handed_to(handed, EMBEDDED, self.config.reads)
            x = self.mix_norm(self.mix[0] * x + self.mix[1] * embedded)
        q, k, v = self._project(x, 0)
        if self.config.value_vocab_size is not None:
            ids: Tensor = handed_to(handed, TOKENS, self.config.reads)
            v = v + self.value_table(ids).view(*ids.shape, self.num_kv_heads, -1).transpose(1, 2)
        seen = mask if self._window is None else self._with_window(mask)
        heads = self._without_own(self._attend(q, DenseSource(k, v), mask=seen, **options), v)
        del q, k, v  # they need not outlive the heads
        return self._finished(x, heads)

    def _without_own(self, heads: Tensor, v: Tensor) -> Tensor:
        """``[B, H, T, V]`` without a part of what lies along values ``[B, G, T, V]``."""
        B, H, T, V = heads.shape
        own = F.normalize(v.float(), dim=-1).to(heads.dtype)[:, :, None]
        rows = heads.view(B, self.num_kv_heads, -1, T, V)
        share = torch.tanh(self.exclusion).to(heads.dtype).view(self.num_kv_heads, -1, 1, 1)
        return (rows - share * (rows * own).sum(dim=-1, keepdim=True) * own).view(B, H, T, V)


register_builder(ExclusiveAttentionConfig, ExclusiveAttention.from_config)
