"""A convolution beside a whole layer, as plain data (DeBERTa-v2's first layer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.feed_forward import ACTIVATIONS, Activation
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ConvolutionConfig(Data):
    """norm(f(x) + act(convolution(x))), with f an encoder's layer.

    Attributes:
        width: Tokens that a token sees, as many on either side.
        groups: Features are cut into so many groups, each of which sees itself alone.
        activation: Of what the convolution gives.
    """

    width: int
    groups: int = 1
    activation: Activation = "tanh"

    def __post_init__(self) -> None:
        check_whole("convolution width", self.width)
        check_whole("convolution groups", self.groups)
        check_choice("convolution activation", self.activation, ACTIVATIONS)
        if self.width % 2 == 0:
            raise ConfigError(f"convolution width must be odd: got {self.width}")

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters but those of the norm, which is one of the layer's."""
        if embed_dim % self.groups:
            raise ConfigError(
                f"convolution groups must divide embed_dim={embed_dim}: got {self.groups}"
            )
        yield ParameterGroup("feed_forward", 1, self.width * embed_dim // self.groups * embed_dim)
        yield ParameterGroup("feed_forward", 1, embed_dim, multiplied=False)
