"""A small vector of every token for each layer, as plain data (Gemma 3n and 4: PLE)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.feed_forward import ACTIVATIONS, Activation
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class PerLayerEmbeddingConfig(Data):
    """A table with a row of every token for all layers, and a projection of its embedding.

    Attributes:
        vocab_size: Rows of the table.
        dim: Features P of a layer's vector.
        norm: Over the P features of each layer's projection.
    """

    vocab_size: int
    dim: int
    norm: NormConfig = field(default_factory=NormConfig)

    def __post_init__(self) -> None:
        check_whole("per_layer_embedding vocab_size", self.vocab_size)
        check_whole("per_layer_embedding dim", self.dim)

    def parameter_groups(self, embed_dim: int, num_layers: int) -> Iterator[ParameterGroup]:
        """All parameters."""
        width = num_layers * self.dim
        yield ParameterGroup("embedding", self.vocab_size, width, multiplied=False, looked_up=True)
        yield ParameterGroup("embedding", 1, width * embed_dim)
        yield ParameterGroup("norms", 1, self.norm.parameters(self.dim), multiplied=False)


@dataclass(frozen=True)
class PerLayerInputConfig(Data):
    """Where a layer reads its vector: x + norm(project(act(gate(x)) · vector)), at its end.

    Attributes:
        dim: Features P of the vector.
        activation: Of the gate.
        norm: Over what is added.
        input_scale: Whether what the gate reads is multiplied by a learned vector (Gemma 3n).
    """

    dim: int
    activation: Activation = "gelu_tanh"
    norm: NormConfig = field(default_factory=NormConfig)
    input_scale: bool = False

    def __post_init__(self) -> None:
        check_whole("per_layer_input dim", self.dim)
        check_choice("activation", self.activation, ACTIVATIONS)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters."""
        yield ParameterGroup("feed_forward", 1, 2 * self.dim * embed_dim)
        yield ParameterGroup("norms", 1, self.norm.parameters(embed_dim), multiplied=False)
        if self.input_scale:
            yield ParameterGroup("norms", 1, embed_dim, multiplied=False)
