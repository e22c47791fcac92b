"""Attention with convolved keys and values, whose queries say what each distance scores.

    score_ij = τ_i (q_i · k_j · scale + s_i · P_(i − j))      P_n: column n of R learned profiles
    q = norm(x Wq)      s = x Wr, R numbers of each head      P_n = 0 from ``extent`` on
    k = norm(c(x Wk))   v = c(x Wv)                           c: ``causal_convolution``

τ is 1, or grows with the logarithm of the query's position. Inkling (Thinking Machines 2026).

Shape letters: B batch, H query heads, G kv heads, T queries, D head size, R profiles, E embed size,
n distances.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import AttentionConfig, DistanceProfilesAttentionConfig
from polyhead.layers import fused
from polyhead.layers.attention_parts import scale_by_temperature
from polyhead.layers.causal_attention import CausalAttention
from polyhead.layers.causal_convolution import CausalConvolution, convolved_call
from polyhead.layers.handed import Handed
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.semantics import (
    Bias,
    DenseSource,
    Keep,
    KeyValueSource,
    Mask,
    RelativeContentBias,
)
from polyhead.semantics.arguments import query_tokens


class DistanceProfilesAttention(CausalAttention):
    """``CausalAttention`` with convolutions and profiles; built from its configuration.

    It takes no bias of scores.

    Attributes:
        k_convolution, v_convolution: Of projected keys and values.
        profile_proj: ``[H · R, E]``, how a query mixes the profiles.
        profiles: ``[R, extent]``.
    """

    config_class: ClassVar[type[AttentionConfig]] = DistanceProfilesAttentionConfig
    config: DistanceProfilesAttentionConfig
    called = "attention with convolved keys"

    def _add_modules(self) -> None:
        c, G = self.config, self.num_kv_heads
        self.k_convolution = CausalConvolution(G * self.head_dim, c.conv_kernel, "k_inputs")
        self.v_convolution = CausalConvolution(G * self.v_head_dim, c.conv_kernel, "v_inputs")
        self.profile_proj = nn.Linear(self.embed_dim, self.num_heads * c.profiles, bias=False)
        self.profiles = nn.Parameter(torch.empty(c.profiles, c.extent))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the profiles: normal with standard deviation 0.02. The rest stays."""
        super().reset_parameters()
        nn.init.normal_(self.profiles, std=0.02)

    def _self_attention(
        self, x: Tensor, positions: Tensor | None, cache: Any, handed: Handed | None
    ) -> tuple[Tensor, KeyValueSource, Mask | None]:
        at: int | Tensor = 0 if cache is None else cache.length
        at = at if positions is None else positions
        with convolved_call(x, positions, cache) as step:
            q, k, v = fused.linears(x, self.q_proj, self.k_proj, self.v_proj)
            k, v = self.k_convolution(k, step), self.v_convolution(v, step)
            q, v = self._queries(q, at), self._values(v)
            k = self._placed(k, self.num_kv_heads, "k_norm", at)
            if isinstance(step, Step):
                return q, step.append("kv", k, v), None
        if positions is None or step.real is None:
            return q, DenseSource(k, v, positions), None
        return q, DenseSource(k, v, positions), Keep((positions >= 0)[..., None, None, :])

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
        if bias is not None:
            raise ValueError("this layer has a bias of its own (profiles): got another")
        own = RelativeContentBias(self._table(x, q, source, positions), nearest=0)
        return super()._answered(x, q, source, mask, own, positions, kernel)

    def _table(
        self, x: Tensor, q: Tensor, source: KeyValueSource, positions: Tensor | None
    ) -> Tensor:
        """``[B, H, T, extent + 1]`` what distances score, those beyond 0."""
        mixed = linear(x, self.profile_proj).view(*x.shape[:2], self.num_heads, -1)
        table = mixed.transpose(1, 2) @ F.pad(self.profiles, (0, 1))
        if self._temperature is not None:
            at = query_tokens(q, source, positions).position_tensor(x.device)
            table = scale_by_temperature(table, at, self._temperature)
        return table


register_builder(DistanceProfilesAttentionConfig, DistanceProfilesAttention.from_config)
