"""Differential attention: the difference of two softmaxes over the same values.

    out_h = (1 − λ₀) · norm((softmax(q_h k_gᵀ) − λ · softmax(q'_h k'_gᵀ)) [v_g | v'_g])
    λ     = exp(λq₁ · λk₁) − exp(λq₂ · λk₂) + λ₀

Ye et al. 2024, "Differential Transformer", eqs. 1-3; heads are paired as in transformers'
DiffLlama: heads h and h + H/2 are q_h and q'_h, and kv heads g and g + G/2 likewise.

A cache keeps G/2 kv heads of double size, [k_g | k'_g] and [v_g | v'_g]. With queries [q_h | 0] and
[0 | q'_h] both softmaxes are heads of one grouped attention call, so every kernel and every cache
serves, keys and values are read once, and a probe sees each softmax as a head of its own. In the
order of a call the heads of a group stand together: first its q_h, then its q'_h.

Shape letters: B batch, H query heads, G kv heads, T queries, D head size, E embed size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches import KeyValueCache
from polyhead.config import AttentionConfig, DifferentialAttentionConfig
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.norms import normalize
from polyhead.layers.registry import register_builder
from polyhead.semantics import KeyValueSource


class DifferentialAttention(MultiHeadAttention):
    """``MultiHeadAttention`` on differences of two softmaxes, for self-attention.

    The constructor takes the arguments of ``MultiHeadAttention``, λ₀ being that of
    ``DifferentialAttentionConfig``; ``from_config`` reaches everything.

    Attributes:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: ``[D]``.
    """

    config_class: ClassVar[type[AttentionConfig]] = DifferentialAttentionConfig
    config: DifferentialAttentionConfig

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def _add_modules(self) -> None:
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.head_dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws λ's vectors: normal with standard deviation 0.1. Projections stay."""
        super().reset_parameters()
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            nn.init.normal_(self.get_parameter(name), std=0.1)

    def weight_of_second(self) -> Tensor:
        """λ, a number in the parameters' dtype."""
        q1, k1, q2, k2 = self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2
        first, second = ((q * k).sum(dtype=torch.float32).exp() for q, k in ((q1, k1), (q2, k2)))
        return first.to(q1.dtype) - second.to(q1.dtype) + self.config.lambda_init

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, H, T, 2D]``, k and v ``[B, G/2, T, 2D]`` of the one call."""
        q, k, v = super()._project(x, positions)
        D, pairs = self.head_dim, self.num_kv_heads // 2
        q = q.reshape(len(q), 2, pairs, -1, *q.shape[2:])
        first, second = F.pad(q[:, 0], (0, D)), F.pad(q[:, 1], (D, 0))
        q = torch.stack((first, second), dim=2).flatten(1, 3)
        return q, torch.cat(k.chunk(2, dim=1), dim=-1), torch.cat(v.chunk(2, dim=1), dim=-1)

    def _cross_attention(
        self,
        x: Tensor,
        context: Context,
        positions: Tensor | None,
        context_positions: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, KeyValueSource]:
        raise ValueError("differential attention is self-attention: got a context")

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        heads = heads.reshape(len(heads), self.num_kv_heads // 2, 2, -1, *heads.shape[2:])
        difference = heads[:, :, 0] - self.weight_of_second().to(heads.dtype) * heads[:, :, 1]
        wide = difference.float() if difference.dtype.itemsize < 4 else difference
        normed = normalize(wide, self.config.norm_eps).to(heads.dtype)
        return ((1 - self.config.lambda_init) * normed).flatten(1, 2)


register_builder(DifferentialAttentionConfig, DifferentialAttention.from_config)
