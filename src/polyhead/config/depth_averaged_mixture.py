"""A mixture whose routers go on from each other, layer after layer, as plain data (ZAYA1's EDA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.data import check_whole
from polyhead.config.layout import NORMED_HALF
from polyhead.config.mixture import MixtureConfig
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class DepthAveragedMixtureConfig(MixtureConfig, kind="depth_averaged_mixture"):
    """``MixtureConfig`` whose router is a network over a state that it hands on to the next layer's
    (EDA: exponential depth averaging, ZAYA1, Zyphra 2025, arXiv 2511.17127).

    Attributes:
        router_dim: Features of the state.
        router_norm: Over the state.
        reads_state: Whether the state of the layer before is added; False in the first layer.
        skips: Experts that give nothing; tokens choose them as the others, and their numbers follow
            those of the ``num_experts`` networks.

    Raises:
        ConfigError: As ``MixtureConfig``, or a choice in groups, by sparsemixer or with a capacity.
    """

    router_dim: int = 256
    router_norm: NormConfig = field(default_factory=NormConfig)
    reads_state: bool = False
    skips: int = 1

    def __post_init__(self) -> None:
        check_whole("router_dim", self.router_dim)
        check_whole("skips", self.skips, least=0)
        if self.groups > 1 or self.scoring == "sparsemixer" or self.capacity is not None:
            raise ConfigError(
                "experts of a depth-averaged router are in no groups and have no capacity, and "
                f"sparsemixer does not choose them: got groups={self.groups}, scoring="
                f"{self.scoring!r}, capacity={self.capacity}"
            )
        super().__post_init__()

    @property
    def choices(self) -> int:
        return self.num_experts + self.skips

    @property
    def state_dim(self) -> int:
        return self.router_dim

    @property
    def reads_dim(self) -> int:
        return self.router_dim if self.reads_state else 0

    def router_features(self, embed_dim: int) -> int:
        return self.router_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        R = self.router_dim
        yield ParameterGroup("feed_forward", 1, R * embed_dim + 2 * R * R)
        yield ParameterGroup("feed_forward", 1, 3 * R + self.reads_dim, multiplied=False)
        yield ParameterGroup("norms", 1, self.router_norm.parameters(R), multiplied=False)

    def peak_activation_elements(self, embed_dim: int, ranks: int) -> int:
        # The state lasts; at first it is normed, in half precision through float32.
        visited = super().peak_activation_elements(embed_dim, ranks)
        return self.router_dim + max(visited, NORMED_HALF * self.router_dim)
