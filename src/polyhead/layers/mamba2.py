"""Mamba-2: heads that remember a state, written by steps of a learned size.

    [z | x | B | C | dt] = u Win;   [x | B | C] = silu(conv([x | B | C]))
    Δ = softplus(dt + dt_bias)      S = exp(−exp(A) Δ) S + Δ B xᵀ       y = Sᵀ C + D x
    out = norm(y · silu(z)) Wout

Dao & Gu 2024, arXiv 2405.21060, sections 2 and 7. B and C are the keys and queries of linear
attention, x its values; a group of heads shares B and C.

Shape letters: B batch, T tokens, H heads (states), G groups, K state size, V value size, C channels
of the convolution, E embed size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import Mamba2Config, NormConfig
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm, normalize
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import RecurrentLayer, as_heads, convolve, with_tail
from polyhead.layers.registry import register_builder


class Mamba2(RecurrentLayer):
    """Self-attention by states that decay, causal by nature; ``from_config`` says more.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, states.
        head_dim: V, features of a value.
        state_dim: K, features of a key.
        num_groups: G, heads of keys and queries.
        conv_kernel: Tokens that the convolution sees.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        in_proj: ``[H V + C + H, E]``, for gates, channels and steps in this order.
        conv_weight, conv_bias: ``[C, conv_kernel]`` and ``[C]`` or None, for x, B and C.
        A_log, D, dt_bias: ``[H]``.
        norm: RMSNorm over the H V values, or over those of each group; or None.
        o_proj: ``[E, H V]``.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    reads_by_heads = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        *,
        num_groups: int = 1,
        conv_kernel: int = 4,
    ) -> None:
        super().__init__()
        config = Mamba2Config(num_heads, num_groups, state_dim, head_dim, conv_kernel)
        self._begin(embed_dim, config)
        self._build(None)

    def _build(self, rope: RoPE | None) -> None:
        c, E = self.config, self.embed_dim
        H, width = c.num_heads, c.num_heads * c.head_dim
        self.in_proj = nn.Linear(E, c.in_features, bias=c.bias)
        self.conv_weight = nn.Parameter(torch.empty(c.channels, c.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(c.channels)) if c.conv_bias else None
        self.A_log, self.D = nn.Parameter(torch.empty(H)), nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        normed = c.norm_place is not None
        self.norm = build_norm(width, NormConfig(eps=c.norm_eps)) if normed else None
        self.o_proj = nn.Linear(width, E, bias=c.has_out_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the convolution anew; exp(A) is 1 to H, D and dt 1. Projections stay."""
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        if self.conv_bias is not None:
            nn.init.uniform_(self.conv_bias, -bound, bound)
        nn.init.ones_(self.D)
        nn.init.ones_(self.dt_bias)
        with torch.no_grad():
            heads = torch.arange(1, len(self.A_log) + 1, device=self.A_log.device)
            self.A_log.copy_(heads.to(self.A_log.dtype).log())

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        c = self.config
        width, keys = c.num_heads * c.head_dim, c.num_groups * c.state_dim
        projected = linear(x, self.in_proj)
        if c.in_scales:
            parts = zip([width, width, keys, keys, c.num_heads], c.in_scales, strict=True)
            scales = [projected.new_full((size,), scale) for size, scale in parts]
            projected = projected * torch.cat(scales)
        gate, inputs, dt = torch.split(projected, [width, c.channels, c.num_heads], dim=-1)
        inputs = with_tail("conv", inputs, c.conv_kernel - 1, step)
        mixed = F.silu(convolve(inputs, self.conv_weight, self.conv_bias))
        values, k, q = torch.split(mixed, [width, keys, keys], dim=-1)
        values = as_heads(values, c.num_heads)
        precise = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(dt.to(precise) + self.dt_bias.to(precise)).clamp(c.dt_min, c.dt_max).mT
        decay = -self.A_log.to(precise).exp()[:, None] * steps
        q, k = as_heads(q, c.num_groups), as_heads(k, c.num_groups)
        heads = self._recurrence(
            q, k, values, real, kernel, step, decay=decay, beta=steps, scale=1.0
        )
        heads = heads.to(precise) + self.D.to(precise)[:, None, None] * values
        joined = heads.transpose(1, 2).flatten(2)
        if c.norm_place == "before":
            joined = self._normed(joined)
        joined = joined * F.silu(gate.to(precise))
        if c.norm_place == "after":
            joined = self._normed(joined)
        edited = self._edited(as_heads(joined.to(x.dtype), c.num_heads))
        return linear(edited.transpose(1, 2).flatten(2), self.o_proj)

    def _normed(self, x: Tensor) -> Tensor:
        """``[B, T, H V]`` normalized over the values of each group."""
        groups = x.view(*x.shape[:2], self.config.num_groups, -1)
        normed = normalize(groups, self.config.norm_eps).flatten(-2)
        weight = None if self.norm is None else self.norm.weight
        return normed if weight is None else normed * weight.to(x.dtype)


register_builder(Mamba2Config, Mamba2.from_config)
