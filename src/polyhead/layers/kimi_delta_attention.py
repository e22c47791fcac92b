"""Kimi delta attention: gated DeltaNet whose states forget each feature of a key at its own rate.

    decay_h = −exp(A_h) · softplus((x Wfa) Wfb_h + dt_h)         K numbers for a head, not one
    out     = concat(norm(o_h) · sigmoid((x Wga) Wgb)_h) Wo      with o_h as in gated DeltaNet

Kimi Team 2025, "Kimi Linear", arXiv 2510.26692, section 3. Both gates go through few
features, in Ling 3.0 straight from the input, where decays are bounded.

Shape letters: B batch, T tokens, H heads (states), K key size, V value size, R rank, E embed size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import KimiDeltaAttentionConfig
from polyhead.layers.gated_delta_net import GatedDeltaNet
from polyhead.layers.linear import linear
from polyhead.layers.recurrent import as_heads
from polyhead.layers.registry import register_builder


class KimiDeltaAttention(GatedDeltaNet):
    """Self-attention by states that decay by features, causal by nature.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, states, each with a key and a value.
        head_dim: K and V.
        gate_rank: R; default ``head_dim``.
        conv_kernel: Tokens that the convolution sees.
        norm_eps: Of the RMSNorm over a head's output.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        q_proj, k_proj, v_proj, beta_proj, o_proj, conv_weight, norm: As of ``GatedDeltaNet``.
        decay_a_proj, decay_b_proj: ``[R, E]`` and ``[H · K, R]``; ``decay_proj`` ``[H · K, E]``
            without ``config.low_rank``.
        gate_a_proj, gate_b_proj: ``[R, E]`` and ``[H · V, R]``; ``gate_proj`` likewise.
        A_log, dt_bias: ``[H]`` and ``[H · K]``, what decays are made with.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        gate_rank: int | None = None,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        nn.Module.__init__(self)
        config = KimiDeltaAttentionConfig(
            num_heads, num_heads, head_dim, head_dim, conv_kernel, norm_eps, gate_rank=gate_rank
        )
        self._begin(embed_dim, config)
        self._build(None)

    def _build_gates(self) -> None:
        config, embed_dim = self.config, self.embed_dim
        H, K, V, R = config.num_heads, config.head_k_dim, config.head_v_dim, config.rank
        for name, width in (("decay", H * K), ("gate", H * V)):
            if config.low_rank:
                self.add_module(f"{name}_a_proj", nn.Linear(embed_dim, R, bias=False))
                self.add_module(f"{name}_b_proj", nn.Linear(R, width, bias=False))
            else:
                self.add_module(f"{name}_proj", nn.Linear(embed_dim, width, bias=False))
        self.dt_bias = nn.Parameter(torch.empty(H * K))

    def _decays(self, x: Tensor) -> Tensor:
        """``[B, H, T, K]`` logarithms, in float32 or more."""
        precise = torch.promote_types(x.dtype, torch.float32)
        raw = self._made(x, "decay").to(precise) + self.dt_bias.to(precise)
        rate, bound = self.A_log.to(precise).exp()[:, None, None], self.config.decay_bound
        if bound is not None:
            bounded: Tensor = -bound * torch.sigmoid(rate * as_heads(raw, len(self.A_log)))
            return bounded
        return -rate * as_heads(F.softplus(raw), len(self.A_log))

    def _raw_gates(self, x: Tensor) -> Tensor:
        return self._made(x, "gate")

    def _made(self, x: Tensor, name: str) -> Tensor:
        """What decays or gates are made of, ``[B, T, H · K]`` or ``[B, T, H · V]``."""
        if not self.config.low_rank:
            return linear(x, self.get_submodule(f"{name}_proj"))
        low = linear(x, self.get_submodule(f"{name}_a_proj"))
        return linear(low, self.get_submodule(f"{name}_b_proj"))


register_builder(KimiDeltaAttentionConfig, KimiDeltaAttention.from_config)
