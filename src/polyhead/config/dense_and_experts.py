"""A dense network beside a mixture of experts, each between norms of its own, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import NORMED_HALF, Network
from polyhead.config.mixture import MixtureConfig
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class DenseAndExpertsConfig(Network, kind="dense_and_experts"):
    """A dense network and experts that read the residual stream side by side (Gemma 4).

    Attributes:
        dense: The network that every token visits.
        mixture: The experts and how tokens choose among them; without a shared network.
        norm: Of what either reads and gives; the router's has no weight.

    Raises:
        ConfigError: A mixture with a shared network or a capacity.
    """

    dense: FeedForwardConfig
    mixture: MixtureConfig
    norm: NormConfig = field(default_factory=NormConfig)

    norms_input: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mixture.shared is not None or self.mixture.capacity is not None:
            raise ConfigError(
                "experts beside a dense network have no shared network and no capacity: got "
                f"shared={self.mixture.shared}, capacity={self.mixture.capacity}"
            )

    @property
    def num_experts(self) -> int:
        """Number of experts X."""
        return self.mixture.num_experts

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from self.dense.parameter_groups(embed_dim)
        yield from self.mixture.parameter_groups(embed_dim)
        yield ParameterGroup("norms", 4, self.norm.parameters(embed_dim), multiplied=False)
        for size in (embed_dim, self.num_experts):  # the router's factors
            yield ParameterGroup("feed_forward", 1, size, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, ranks: int) -> int:
        E, parts = embed_dim, (self.dense, self.mixture)
        # What a part works on, beside what it reads and what the dense network gave.
        most = max(part.peak_activation_elements(E, ranks) for part in parts)
        return 2 * E + max(most, NORMED_HALF * E)

    def widths(self) -> Mapping[str, int]:
        experts = {f"expert_{name}": width for name, width in self.mixture.widths().items()}
        return {**self.dense.widths(), **experts}
