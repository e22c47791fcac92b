"""A real-gated linear recurrent unit (RG-LRU): channels that remember one number each.

    u = conv(x Wx)        r = σ(u Wr + br)        i = σ(u Wi + bi)        by blocks of channels
    log a = −8 r · softplus(Λ)        s = a · s + √(1 − a²) · i · u        out = (s · f(x Wy)) Wo

De et al. 2024, arXiv 2402.19427, section 2.4 (Griffin; RecurrentGemma). What the first token of a
sequence writes is not multiplied by √(1 − a²).

Shape letters: B batch, T tokens, W channels, H blocks, D channels of a block, E embed size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import RgLruConfig
from polyhead.layers.feed_forward import activate
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import (
    RecurrentLayer,
    as_heads,
    convolve,
    kernel_of_channels,
    with_tail,
)
from polyhead.layers.registry import register_builder

_SHARPNESS = 8.0
_LARGEST_GRADIENT = 1000.0
"""Of the square root, as the model was trained."""


class RgLru(RecurrentLayer):
    """Self-attention's place taken by the states of channels, causal by nature.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, blocks of channels.
        width: W; default E.
        conv_kernel: Tokens that the convolution sees.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        x_proj, gate_proj: ``[W, E]`` each, with biases: what is remembered, and what multiplies it.
        conv_weight, conv_bias: ``[W, conv_kernel]`` and ``[W]``.
        write_weight, decay_weight: ``[H, D, D]`` Wi and Wr, from input to output.
        write_bias, decay_bias: ``[H, D]``.
        decay: ``[W]`` Λ.
        o_proj: ``[E, W]`` with a bias.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, width: int | None = None, conv_kernel: int = 4
    ) -> None:
        super().__init__()
        width = embed_dim if width is None else width
        self._begin(embed_dim, RgLruConfig(num_heads, width=width, conv_kernel=conv_kernel))
        self._build(None)

    def _build(self, rope: RoPE | None) -> None:
        c, E = self.config, self.embed_dim
        W, H, D = c.width, c.num_heads, c.width // c.num_heads
        self.x_proj, self.gate_proj = nn.Linear(E, W), nn.Linear(E, W)
        self.conv_weight = nn.Parameter(torch.empty(W, c.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(W))
        for name in ("write", "decay"):
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(H, D, D)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(H, D)))
        self.decay = nn.Parameter(torch.empty(W))
        self.o_proj = nn.Linear(W, E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws convolution and gates anew; where r = 1/8, a is 0.9 to 0.999. Projections stay."""
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)
        size = (self.config.width // self.config.num_heads) ** -0.5
        for name in ("write", "decay"):
            nn.init.normal_(self.get_parameter(f"{name}_weight"), std=size)
            nn.init.zeros_(self.get_parameter(f"{name}_bias"))
        with torch.no_grad():
            drawn = torch.empty_like(self.decay).uniform_(0.9**2, 0.999**2)
            self.decay.copy_((drawn.log() * -0.5).expm1().log())

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        c = self.config
        branch = activate(linear(x, self.gate_proj), c.activation)
        inputs = with_tail("conv", linear(x, self.x_proj), c.conv_kernel - 1, step)
        mixed = as_heads(convolve(inputs, self.conv_weight, self.conv_bias), c.num_heads)
        precise = torch.promote_types(x.dtype, torch.float32)
        written = self._gate(mixed, "write") * mixed
        rates = F.softplus(self.decay.to(precise)).view(c.num_heads, 1, -1)
        decay = -_SHARPNESS * self._gate(mixed, "decay").to(precise) * rates
        values = written.to(precise) * self._factor(decay, step)
        ones = values.new_ones(x.shape[0], 1, x.shape[1], 1)
        states = self._recurrence(
            ones, ones, _by_channel(values)[..., None], real, kernel_of_channels(kernel, x), step,
            decay=_by_channel(decay), scale=1.0,
        )  # fmt: skip
        heads = states.squeeze(-1).mT.to(x.dtype) * branch
        edited = self._edited(as_heads(heads, c.num_heads))
        return linear(edited.transpose(1, 2).flatten(2), self.o_proj)

    def _gate(self, mixed: Tensor, name: str) -> Tensor:
        """``[B, H, T, D]`` a gate that reads the channels of its block."""
        weight, bias = self.get_parameter(f"{name}_weight"), self.get_parameter(f"{name}_bias")
        return torch.sigmoid(torch.matmul(mixed, weight) + bias[:, None])

    def _factor(self, decay: Tensor, step: Step | None) -> Tensor:
        """``[B, H, T, D]`` √(1 − a²), and 1 for the first token of a sequence."""
        left = -torch.expm1(2.0 * decay)
        root = left.detach().sqrt()
        # The root's value, with a bounded gradient.
        slope = 0.5 / root.clamp(min=0.5 / _LARGEST_GRADIENT)
        factor = root + (left - left.detach()) * slope
        first = torch.zeros(*decay.shape[::2], dtype=torch.bool, device=decay.device)
        before = [0] * len(first) if step is None else step.before
        first[[row for row, count in enumerate(before) if not count], :1] = True
        return torch.where(first[:, None, :, None], 1.0, factor)


def _by_channel(x: Tensor) -> Tensor:
    """``[B, H, T, D]`` as ``[B, W, T]``."""
    return x.mT.flatten(1, 2)


register_builder(RgLruConfig, RgLru.from_config)
