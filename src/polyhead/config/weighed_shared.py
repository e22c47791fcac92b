"""A mixture whose router weighs the shared networks beside the routed ones, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.data import check_whole
from polyhead.config.mixture import MixtureConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class WeighedSharedConfig(MixtureConfig, kind="weighed_shared"):
    """``MixtureConfig`` whose weights are shares of all networks that a token visits (Inkling).

    Attributes:
        num_shared: Networks S that every token visits, side by side in ``shared``, which is as wide
            as all of them together. The router scores them too, behind the routed ones.

    Raises:
        ConfigError: As ``MixtureConfig``, or anything but sigmoids that are normalized.
    """

    num_shared: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("num_shared", self.num_shared)
        network = self.shared
        if network is None or not network.gated or network.dropout or network.out_scale != 1.0:
            raise ConfigError(
                "weighed shared networks are gated, without dropout or a factor of their output: "
                f"got shared={network}"
            )
        if network.hidden_dim % self.num_shared or network.has_down_bias:
            raise ConfigError(
                f"shared must hold num_shared={self.num_shared} equal networks side by side, "
                f"without a bias of their output: got {network}"
            )
        plain = MixtureConfig(
            self.expert,
            self.num_experts,
            self.experts_per_token,
            network,
            scoring="sigmoid",
            choice_bias=self.choice_bias,
            normalize=True,
            scale=self.scale,
        )
        if any(getattr(self, name) != value for name, value in vars(plain).items()):
            raise ConfigError(
                "shared networks are weighed by sigmoids that are normalized, without groups, "
                f"capacity and biases of the router: got {self}"
            )

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        yield ParameterGroup("feed_forward", 1, self.num_shared * embed_dim, as_numbers=True)
