"""A convolution beside a whole layer of an encoder.

    y = norm(f(x) + act(convolution(x)))        f: the layer

He et al. 2021, "DeBERTa"; the second version has it in its first layer, where the neighbours of a
token are read as n-grams. Padding counts as zeros.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.config import NormConfig
from polyhead.config.convolution import ConvolutionConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.feed_forward import activate
from polyhead.layers.fixed import Fixed
from polyhead.layers.norms import build_norm
from polyhead.layers.sparse_encoder import lengths_of_rows
from polyhead.semantics import KeyLengths, Mask


class Convolution(Fixed):
    """Joins a convolution of a layer's input to its output; see the module.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Width, groups and activation.
        norm: Over the sum.
    """

    def __init__(self, embed_dim: int, config: ConvolutionConfig, norm: NormConfig) -> None:
        super().__init__()
        if embed_dim % config.groups:
            raise ConfigError(
                f"convolution groups must divide embed_dim={embed_dim}: got {config.groups}"
            )
        self.config = config
        self.conv = nn.Conv1d(
            embed_dim, embed_dim, config.width, padding=config.width // 2, groups=config.groups
        )
        self.norm = build_norm(embed_dim, norm)

    def forward(self, x: Tensor, made: Tensor, mask: Mask | None) -> Tensor:
        """The layer's input, its output and the mask of the call, ``[B, T, E]`` to the same.

        Raises:
            UnsupportedError: Another mask than ``KeyLengths``.
        """
        if isinstance(mask, KeyLengths):
            places = torch.arange(x.shape[1], device=x.device)
            padding = places >= lengths_of_rows(mask, x)[:, None]
            x = x.masked_fill(padding[..., None], 0.0)
        elif mask is not None:
            raise UnsupportedError(
                f"a convolution understands no mask but KeyLengths: got {mask!r}"
            )
        beside: Tensor = self.conv(x.mT).mT
        joined: Tensor = self.norm(made + activate(beside, self.config.activation))
        return joined
