"""A gated convolution over the last few tokens, which stands in for attention in most layers.

    [b | c | h] = x Win        y = conv(b · h)        out = (c · y) Wout

LFM2 (Liquid AI, 2025, arXiv 2511.23404, section 2.1). It remembers ``conv_kernel`` − 1 inputs.

Shape letters: B batch, T tokens, W channels, E embed size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import ShortConvolutionConfig
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import RecurrentLayer, convolve, with_tail
from polyhead.layers.registry import register_builder


class ShortConvolution(RecurrentLayer):
    """A causal, gated convolution of each channel.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        width: Channels W; default E.
        conv_kernel: Tokens that the convolution sees.
        bias: Biases on the projections and the convolution.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        in_proj: ``[3 W, E]``, for b, c and h in this order.
        conv_weight, conv_bias: ``[W, conv_kernel]`` and ``[W]``; the bias is None without biases.
        o_proj: ``[E, W]``.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        width: int | None = None,
        conv_kernel: int = 3,
        bias: bool = False,
    ) -> None:
        super().__init__()
        config = ShortConvolutionConfig(
            width=embed_dim if width is None else width, conv_kernel=conv_kernel, bias=bias
        )
        self._begin(embed_dim, config)
        self._build(None)

    def _build(self, rope: RoPE | None) -> None:
        W, bias = self.config.width, self.config.bias
        self.in_proj = nn.Linear(self.embed_dim, 3 * W, bias=bias)
        self.conv_weight = nn.Parameter(torch.empty(W, self.config.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(W)) if bias else None
        self.o_proj = nn.Linear(W, self.embed_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the convolution anew, as torch's ``Conv1d``. Projections stay."""
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        if self.conv_bias is not None:
            nn.init.uniform_(self.conv_bias, -bound, bound)

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        b, c, h = linear(x, self.in_proj).chunk(3, dim=-1)
        inputs = with_tail("conv", b * h, self.config.conv_kernel - 1, step)
        mixed = convolve(inputs, self.conv_weight, self.conv_bias)
        edited = self._edited((c * mixed)[:, None])[:, 0]
        return linear(edited, self.o_proj)


register_builder(ShortConvolutionConfig, ShortConvolution.from_config)
