"""Mixture of attention heads: experts make the queries of a token, and the output of its heads.

    chosen = the K experts with the greatest x Wr,   w = softmax over them
    head_e,g = Attention(x Wq_e,g, x Wk_g, x Wv_g)   for each chosen expert e and each kv head g
    out      = Σ_e w_e · concat(head_e,1 … head_e,G) Wo_e + b

Zhang et al. 2022, "Mixture of Attention Heads" (arXiv 2210.05144); JetMoE (Shen et al. 2024). The
kv heads are the same for all experts, so a cache holds G of them.

Shape letters: B batch, H = G · K query heads, G kv heads, K experts of a token, X experts,
T tokens, D head size, V value size, E embed size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AttentionConfig, ExpertHeadsAttentionConfig
from polyhead.layers import fused
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.semantics import KeyValueSource


class ExpertHeadsAttention(MultiHeadAttention):
    """``MultiHeadAttention`` of experts, for self-attention; built from its config.

    Attributes:
        router: ``[X, E]`` weight.
        q_experts: ``[X, G · D, E]``, in place of ``q_proj``.
        o_experts: ``[X, E, G · V]``, in place of ``o_proj``.
        o_bias: ``[E]``, or None.
    """

    config_class: ClassVar[type[AttentionConfig]] = ExpertHeadsAttentionConfig
    config: ExpertHeadsAttentionConfig
    o_bias: nn.Parameter | None

    def _add_modules(self) -> None:
        config, E, X, G = self.config, self.embed_dim, self.config.num_experts, self.num_kv_heads
        del self.q_proj, self.o_proj
        self.router = nn.Linear(E, X, bias=False)
        self.q_experts = nn.Parameter(torch.empty(X, G * self.head_dim, E))
        self.o_experts = nn.Parameter(torch.empty(X, E, G * self.v_head_dim))
        bias = nn.Parameter(torch.zeros(E)) if config.out_bias else None
        self.register_parameter("o_bias", bias)
        self._rotates_together = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the experts: normal with standard deviation 0.02; the output's bias is 0."""
        super().reset_parameters()
        nn.init.normal_(self.q_experts, std=0.02)
        nn.init.normal_(self.o_experts, std=0.02)
        if self.o_bias is not None:
            nn.init.zeros_(self.o_bias)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[B, T, K]`` and numbers ``[B, T, K]`` of the experts that tokens visit."""
        logits = linear(x, self.router).float()
        best, chosen = logits.topk(self.config.experts_per_token, dim=-1)
        return best.softmax(dim=-1).to(x.dtype), chosen

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        G, K = self.num_kv_heads, self.config.experts_per_token
        _, chosen = self.route(x)
        rows = x.unsqueeze(2).expand(-1, -1, K, -1).reshape(B * T * K, -1)
        made = _by_expert(rows, chosen.flatten(), self.q_experts).view(B, T, K, G, -1)
        q = made.transpose(2, 3).reshape(B, T, -1)  # the heads of a kv head side by side
        k, v = fused.linears(x, self.k_proj, self.v_proj)
        return (
            self._queries(q, positions),
            self._placed(k, G, "k_norm", positions),
            self._values(v),
        )

    def _cross_attention(
        self,
        x: Tensor,
        context: Context,
        positions: Tensor | None,
        context_positions: Tensor | None,
        cache: object,
    ) -> tuple[Tensor, KeyValueSource]:
        raise ValueError("heads of experts are self-attention: got a context")

    def _output(self, x: Tensor, heads: Tensor) -> Tensor:
        B, T, _ = x.shape
        G, K = self.num_kv_heads, self.config.experts_per_token
        weights, chosen = self.route(x)
        rows = heads.view(B, G, K, T, -1).permute(0, 3, 2, 1, 4).reshape(B * T * K, -1)
        made = _by_expert(rows, chosen.flatten(), self.o_experts).view(B, T, K, -1)
        out = (made * weights[..., None]).sum(dim=2)
        return out if self.o_bias is None else out + self.o_bias


def _by_expert(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``[n, out]``: each of the ``rows`` ``[n, in]`` times the matrix that ``chosen`` ``[n]`` says.

    Args:
        rows: Of all tokens, one for each expert that a token visits.
        chosen: Their experts.
        weights: ``[X, out, in]``.
    """
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=len(weights)).tolist()
    parts = torch.split(rows[order], counts)
    made = [F.linear(part, weights[i]) for i, part in enumerate(parts) if len(part)]
    return torch.cat(made)[order.argsort()]


register_builder(ExpertHeadsAttentionConfig, ExpertHeadsAttention.from_config)
