"""A small network behind a layer's feed-forward network, as plain data (X-MOD's languages)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.feed_forward import ACTIVATIONS, Activation
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class AdapterConfig(Data):
    """r + network(n), with x the sum behind the feed-forward network, n its norm, r one of the two.

    Attributes:
        dim: Hidden features of the network.
        activation: Between its two projections.
        norm: ``"own"``: n has a norm of its own; ``"shared"``: that of the feed-forward network;
            None: n is x.
        keeps_normed: Whether r is n, not x.
        name: What files call it.
    """

    dim: int
    activation: Activation = "gelu"
    norm: Literal["own", "shared"] | None = "shared"
    keeps_normed: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        check_whole("adapter dim", self.dim)
        check_choice("adapter activation", self.activation, ACTIVATIONS)
        check_choice("adapter norm", self.norm, (None, "own", "shared"))

    def parameter_groups(self, embed_dim: int, norm: NormConfig) -> Iterator[ParameterGroup]:
        """All parameters; ``norm`` is the kind of the layer's norms."""
        yield ParameterGroup("feed_forward", 1, 2 * self.dim * embed_dim)
        yield ParameterGroup("feed_forward", 1, self.dim + embed_dim, multiplied=False)
        if self.norm == "own":
            yield ParameterGroup("norms", 1, norm.parameters(embed_dim), multiplied=False)
