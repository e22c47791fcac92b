"""Dynamic mask attention: numbers made of values join the scores of keys, and choose keys.

    n_j   = exp(A ∘ softplus(v_j Wn))        of token j, one for each kv head
    out_i = Σ_j softmax_j(q_i · k_j · scale + n_j) v_j

with j the ``top_k`` keys of highest n_j among those that query i sees, of equal ones the first.
Shi et al. 2025, "Trainable Dynamic Mask Sparse Attention", arXiv 2508.02124; Doge. The number of a
key is one more feature of it, for which every query has 1 / scale: each kernel and cache serves.

Shape letters: B batch, H query heads, G kv heads, T queries, D head size, V value size, E embed
size.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AttentionConfig, DynamicMaskConfig
from polyhead.kernels.choosing import choose_by_key
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, KeyValueSource, Mask


class DynamicMaskAttention(MultiHeadAttention):
    """``MultiHeadAttention`` to the keys that values choose, for self-attention.

    No gradient flows through the choice; A and Wn learn by what they add to scores.

    Attributes:
        dt_proj: ``[G, G · V]``, Wn.
        A: ``[G]``, at first 0, where all keys have the same number.
    """

    config_class: ClassVar[type[AttentionConfig]] = DynamicMaskConfig
    config: DynamicMaskConfig

    def _add_modules(self) -> None:
        G, values = self.num_kv_heads, self.num_kv_heads * self.v_head_dim
        self.dt_proj = nn.Linear(values, G, bias=self.config.qkv_bias)
        self.A = nn.Parameter(torch.zeros(G))

    def reset_parameters(self) -> None:
        """Sets A, and the sinks, to 0. Projections and norms stay."""
        super().reset_parameters()
        nn.init.zeros_(self.A)

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, H, T, D + 1]``, k ``[B, G, T, D + 1]``, v ``[B, G, T, V]``."""
        q, k, v = super()._project(x, positions)
        numbers = linear(v.transpose(1, 2).flatten(2), self.dt_proj)
        numbers = torch.exp(self.A * F.softplus(numbers)).mT[..., None]
        ones = q.new_full((*q.shape[:3], 1), 1.0 / self.scale)
        return torch.cat((q, ones), dim=-1), torch.cat((k, numbers), dim=-1), v

    def _answered(
        self,
        x: Tensor,
        q: Tensor,
        source: KeyValueSource,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        positions: Tensor | None,
        kernel: str,
    ) -> Tensor:
        if source.tokens.length > self.config.top_k:
            mask = mask if self._window is None else self._with_window(mask)
            chosen = choose_by_key(
                lambda tile: source.read(tile)[0][:, :, None, :, -1],
                q,
                source,
                self.config.top_k,
                mask=mask,
                q_positions=positions,
            )
            mask = chosen if mask is None else mask & chosen
        return super()._answered(x, q, source, mask, bias, positions, kernel)

    def _cross_attention(self, *_: object) -> NoReturn:
        raise ValueError("a dynamic mask is made of the layer's own values: got a context")


register_builder(DynamicMaskConfig, DynamicMaskAttention.from_config)
