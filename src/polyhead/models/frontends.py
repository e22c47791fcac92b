"""What some models read in place of token ids: patches of an image, frames of sound.

Shape letters: B batch, T vectors, E embed size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AudioConfig, Frontend, PatchConfig
from polyhead.errors import InputError, UnsupportedError
from polyhead.layers.fixed import Fixed


class Patches(Fixed):
    """Squares of an image, each projected to a vector (Dosovitskiy et al. 2021, eq. 1).

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Patch and image sizes.

    Attributes:
        projection: ``[E, channels, height, width]`` of a patch.
        class_token: ``[E]`` in front of the patches, or None.
    """

    class_token: nn.Parameter | None

    def __init__(self, embed_dim: int, config: PatchConfig) -> None:
        super().__init__()
        self.config = config
        size = config.patch_size
        self.projection = nn.Conv2d(config.channels, embed_dim, size, size, bias=config.bias)
        first = nn.Parameter(torch.empty(embed_dim)) if config.class_token else None
        self.register_parameter("class_token", first)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projection.weight, std=0.02)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, channels, height, width]`` to ``[B, T, E]``, patches row by row."""
        shape = (self.config.channels, *self.config.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != shape:
            raise InputError(f"images must be [B, {shape}]: got {list(images.shape)}")
        # A token's numbers side by side here: every layer keeps the order that it gets.
        x: Tensor = self.projection(images).flatten(2).mT.contiguous()
        if self.class_token is None:
            return x
        return torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)


class AudioFrames(Fixed):
    """Mel features by two convolutions (Radford et al. 2022, §2.2).

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Number of features.
    """

    def __init__(self, embed_dim: int, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.num_mel_bins, embed_dim, 3, padding=1)
        self.conv2 = nn.Conv1d(embed_dim, embed_dim, 3, stride=2, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, num_mel_bins, frames]`` to ``[B, frames / 2, E]``."""
        if features.ndim != 3 or features.shape[1] != self.config.num_mel_bins:
            raise InputError(
                f"features must be [B, num_mel_bins={self.config.num_mel_bins}, frames]: got "
                f"{list(features.shape)}"
            )
        return F.gelu(self.conv2(F.gelu(self.conv1(features)))).mT.contiguous()


def build_frontend(embed_dim: int, config: Frontend) -> Patches | AudioFrames:
    """The module that ``config`` describes."""
    if isinstance(config, PatchConfig):
        return Patches(embed_dim, config)
    if isinstance(config, AudioConfig):
        return AudioFrames(embed_dim, config)
    raise UnsupportedError(f"no module is made from a {type(config).__name__}")
