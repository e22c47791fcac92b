"""One residual stream that learned vectors scale, before each part of a layer joins it.

    x ← (x + b) · a + (f(x) + d) · c        at first x = (e + b') · a', with e the embedding

The stream is float32 (float64 beside float64), and f, a part of a layer, reads it in the dtype of
the weights. ZAYA1 (Zyphra 2025, arXiv 2511.17127).

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.config import ScaledResidualConfig
from polyhead.layers.streams import StreamEnds, StreamMixer, register_streams


class ScaledResidual(StreamMixer):
    """Gives a part the stream ``[B, T, E]``, and joins what it makes; see the module.

    Args:
        embed_dim: Embedding size E of the stream.
        config: Not read.

    Attributes:
        scale, shift: ``[E]`` a and b, of the stream.
        made_scale, made_shift: ``[E]`` c and d, of what a part makes.
    """

    def __init__(self, embed_dim: int, config: ScaledResidualConfig) -> None:
        super().__init__()
        self.scale, self.shift = _vectors(embed_dim)
        self.made_scale, self.made_shift = _vectors(embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets factors to 1 and shifts to 0: a plain sum."""
        _reset(self)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        return streams.to(self.scale.dtype), streams

    def write(self, kept: Tensor, made: Tensor) -> Tensor:
        made = (made + self.made_shift) * self.made_scale
        return (kept + self.shift) * self.scale + made


class ScaledResidualEnds(StreamEnds):
    """Scales the embedding, and gives the stream in the dtype of the weights.

    Args:
        embed_dim: Embedding size E of the stream.
        config: Not read.

    Attributes:
        scale, shift: ``[E]`` a' and b'.
    """

    def __init__(self, embed_dim: int, config: ScaledResidualConfig) -> None:
        super().__init__()
        self.scale, self.shift = _vectors(embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets factors to 1 and shifts to 0."""
        _reset(self)

    def enter(self, x: Tensor) -> Tensor:
        made = (x + self.shift) * self.scale
        return made.to(torch.promote_types(made.dtype, torch.float32))

    def leave(self, streams: Tensor) -> Tensor:
        return streams.to(self.scale.dtype)


def _vectors(embed_dim: int) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.empty(embed_dim)), nn.Parameter(torch.empty(embed_dim))


def _reset(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        nn.init.constant_(parameter, float(name.endswith("scale")))


register_streams(ScaledResidualConfig, ScaledResidual, ScaledResidualEnds)
