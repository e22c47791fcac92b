"""Lightning attention: linear attention whose heads forget at fixed rates.

    [q | k | v] = act(x [Wq | Wk | Wv])
    S = exp(−s_h) S + k vᵀ;  o = Sᵀ q          s_h = slope_scale · 2^(−8h/H)
    out = (norm(concat(o_1 … o_H)) · sigmoid(x Wg)) Wo

Qin et al. 2024, arXiv 2405.17381; MiniMax 2025, arXiv 2501.08313, section 2.2. Positions enter by
the decay alone; the slopes are ALiBi's.

Shape letters: B batch, T tokens, H heads (states), D head size, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import LightningAttentionConfig, NormConfig
from polyhead.layers import fused
from polyhead.layers.feed_forward import activate
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import RecurrentLayer, as_heads
from polyhead.layers.registry import register_builder


class LightningAttention(RecurrentLayer):
    """Self-attention by states that decay at fixed rates, causal by nature.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, states.
        head_dim: D.
        slope_scale: Factor of the slopes, in MiniMax's models less with each layer.
        norm_eps: Of the RMSNorm over all heads' outputs.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        q_proj, k_proj, v_proj, gate_proj, o_proj: The projections, without biases.
        norm: RMSNorm over the H · D features of all heads.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    reads_by_heads = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        slope_scale: float = 1.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        config = LightningAttentionConfig(
            num_heads, head_dim, slope_scale=slope_scale, norm_eps=norm_eps
        )
        self._begin(embed_dim, config)
        self._build(None)

    def _build(self, rope: RoPE | None) -> None:
        width, E = self.config.num_heads * self.config.head_dim, self.embed_dim
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj"):
            self.add_module(name, nn.Linear(E, width, bias=False))
        self.norm = build_norm(width, NormConfig(eps=self.config.norm_eps))
        self.o_proj = nn.Linear(width, E, bias=False)

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        heads = self._heads(x, real, kernel, step)
        joined = self.norm(heads.transpose(1, 2).flatten(2))
        gated = joined * torch.sigmoid(linear(x, self._modules["gate_proj"]))
        edited = self._edited(as_heads(gated, self.config.num_heads))
        return linear(edited.transpose(1, 2).flatten(2), self.o_proj)

    def _heads(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        """``[B, H, T, D]``."""
        modules, c = self._modules, self.config
        q, k, v = (
            as_heads(activate(each, c.activation), c.num_heads)
            for each in fused.linears(x, modules["q_proj"], modules["k_proj"], modules["v_proj"])
        )
        precise = torch.promote_types(x.dtype, torch.float32)
        numbers = torch.arange(1, c.num_heads + 1, device=x.device)
        slopes = (2.0 ** (-8.0 / c.num_heads)) ** numbers * c.slope_scale
        return self._recurrence(q, k, v, real, kernel, step, decay=-slopes.to(precise), scale=1.0)


register_builder(LightningAttentionConfig, LightningAttention.from_config)
