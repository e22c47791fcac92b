"""Multi-matrix factorization attention: many large query heads, made through a low rank.

    q_h = norm(x Wq) Wb_h         k_g = x Wk_g         v_g = x Wv_g

Wq has C columns, which all heads share. Hu et al. 2024, "Multi-matrix Factorization Attention",
arXiv 2412.19255 (MFA, with one kv head and no norm); with a norm in Step-3.

Shape letters: B batch, H query heads, T queries, D head size, E embed size, C the rank.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from polyhead.config import AttentionConfig, FactorizedAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder


class FactorizedAttention(MultiHeadAttention):
    """``MultiHeadAttention`` with queries of low rank; built from its config.

    Attributes:
        q_proj: ``[C, E]``, Wq.
        q_a_norm: Over the C numbers; nothing where ``config.q_rank_norm`` is None.
        q_b_proj: ``[H · D, C]``, Wb.
    """

    projects_heads = False
    config_class: ClassVar[type[AttentionConfig]] = FactorizedAttentionConfig
    config: FactorizedAttentionConfig

    def _add_modules(self) -> None:
        rank, norm = self.config.q_rank, self.config.q_rank_norm
        self.q_a_norm = nn.Identity() if norm is None else build_norm(rank, norm)
        self.q_b_proj = nn.Linear(rank, self.num_heads * self.head_dim, bias=False)
        self._rotates_together = False  # queries are not beside the keys

    def _queries(self, projected: Tensor, positions: int | Tensor) -> Tensor:
        return super()._queries(linear(self.q_a_norm(projected), self.q_b_proj), positions)


register_builder(FactorizedAttentionConfig, FactorizedAttention.from_config)
