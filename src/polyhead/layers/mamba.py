"""Mamba: channels that remember a state each, written by steps of a learned size.

    [x | z] = u Win;   x = silu(conv(x));   [r | B | C] = x Wx
    Δ = softplus(r Wdt + dt)        S_w = exp(−exp(A_w) Δ_w) S_w + Δ_w x_w B       y_w = S_w · C
    out = ((y + D x) · silu(z)) Wout

Gu & Dao 2023, arXiv 2312.00752, section 3. S_w holds N numbers, each of which decays at its own
rate: a head of one value whose keys B and queries C all channels share. Zamba (Glorioso et al.
2024, arXiv 2405.16712) cuts the channels into groups, each with r, B, C and Δ made of its own x.

Shape letters: B batch, T tokens, W channels (states), G their groups, N state size, R rank of
steps, E embed size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import MambaConfig
from polyhead.layers.grouped import GroupedLinear
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import RecurrentLayer, convolve, kernel_of_channels, with_tail
from polyhead.layers.registry import register_builder


class Mamba(RecurrentLayer):
    """Self-attention by the states of channels, causal by nature.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_channels: W.
        state_dim: N.
        step_rank: R; default E / 16, rounded up.
        conv_kernel: Tokens that the convolution sees.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        in_proj: ``[2 W, E]``, for channels and gates in this order.
        conv_weight, conv_bias: ``[W, conv_kernel]`` and ``[W]`` or None.
        x_proj: ``[G (R + 2 N), W / G]``, for steps, B and C of each group.
        dt_proj: ``[W, R]`` with a bias.
        A_log, D: ``[W, N]`` and ``[W]``.
        dt_norm, b_norm, c_norm: Norms of the three, or None.
        o_proj: ``[E, W]``.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_channels: int,
        state_dim: int = 16,
        *,
        step_rank: int | None = None,
        conv_kernel: int = 4,
    ) -> None:
        super().__init__()
        rank = math.ceil(embed_dim / 16) if step_rank is None else step_rank
        self._begin(embed_dim, MambaConfig(num_channels, state_dim, rank, conv_kernel))
        self._build(None)

    def _build(self, rope: RoPE | None) -> None:
        c, E = self.config, self.embed_dim
        W, N, R, G = c.num_heads, c.state_dim, c.step_rank, c.num_groups
        self.in_proj = nn.Linear(E, 2 * W, bias=c.bias)
        self.conv_weight = nn.Parameter(torch.empty(W, c.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(W)) if c.conv_bias else None
        self.x_proj = _projection(W, G * (R + 2 * N), G, bias=False)
        self.dt_proj = _projection(G * R, W, G, bias=True)
        self.A_log, self.D = nn.Parameter(torch.empty(W, N)), nn.Parameter(torch.empty(W))
        for name, size in (("dt_norm", R), ("b_norm", N), ("c_norm", N)):
            self.add_module(name, None if c.norm is None else build_norm(size, c.norm))
        self.o_proj = nn.Linear(W, E, bias=c.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the convolution anew; exp(A) is 1 to N in each channel, D 1. Projections stay."""
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        if self.conv_bias is not None:
            nn.init.uniform_(self.conv_bias, -bound, bound)
        nn.init.ones_(self.D)
        with torch.no_grad():
            numbers = torch.arange(1, self.config.state_dim + 1, device=self.A_log.device)
            self.A_log.copy_(numbers.to(self.A_log.dtype).log().expand_as(self.A_log))

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        c = self.config
        inputs, gate = linear(x, self.in_proj).chunk(2, dim=-1)
        inputs = with_tail("conv", inputs, c.conv_kernel - 1, step)
        mixed = F.silu(convolve(inputs, self.conv_weight, self.conv_bias))
        made = linear(mixed, self.x_proj).view(*x.shape[:2], c.num_groups, -1)
        parts = torch.split(made, [c.step_rank, c.state_dim, c.state_dim], dim=-1)
        names = "dt_norm", "b_norm", "c_norm"
        norms = [self._modules[name] for name in names]
        ranks, k, q = (
            part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True)
        )
        precise = torch.promote_types(x.dtype, torch.float32)
        bias: Any = self.dt_proj.bias
        # It is added in float32, as transformers' layer does.
        steps = F.softplus(self._steps(ranks.flatten(2)).to(precise) + bias.to(precise)).mT
        decay = -self.A_log.to(precise).exp()[:, None] * steps[..., None]
        values = mixed.mT[..., None]
        kernel = kernel_of_channels(kernel, x)
        heads = self._recurrence(
            q.transpose(1, 2), k.transpose(1, 2), values, real, kernel, step,
            decay=decay, beta=steps, scale=1.0,
        )  # fmt: skip
        outputs = heads.to(precise) + self.D.to(precise)[:, None, None] * values
        gated = outputs * F.silu(gate.to(precise)).mT[..., None]
        edited = self._edited(gated.to(x.dtype))
        return linear(edited.transpose(1, 2).flatten(2), self.o_proj)

    def _steps(self, ranks: Tensor) -> Tensor:
        """``[B, T, W]`` from ``[B, T, G · R]``, without the bias."""
        if isinstance(self.dt_proj, GroupedLinear):
            return self.dt_proj.product(ranks)
        return F.linear(ranks, self.dt_proj.weight)


def _projection(
    in_features: int, out_features: int, groups: int, *, bias: bool
) -> nn.Linear | GroupedLinear:
    if groups == 1:
        return nn.Linear(in_features, out_features, bias=bias)
    return GroupedLinear(in_features, out_features, groups, bias=bias)


register_builder(MambaConfig, Mamba.from_config)
