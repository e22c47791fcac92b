"""A mixture whose router weighs the experts that all tokens visit beside those chosen, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from polyhead.config.data import check_whole
from polyhead.config.mixture import MixtureConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class WeighedSharedConfig(MixtureConfig, kind="weighed_shared"):
    """``MixtureConfig`` with shared experts whose weights are of one sum with the others (Inkling).

    Attributes:
        num_shared: Experts S that every token visits beside those that it chooses; their numbers
            follow those of the ``num_experts`` others. No bias of the choice is theirs.

    Raises:
        ConfigError: As ``MixtureConfig``, or groups of experts, or a choice by sparsemixer.
    """

    num_shared: int = 1

    def __post_init__(self) -> None:
        check_whole("num_shared", self.num_shared)
        if self.groups > 1 or self.scoring == "sparsemixer" or self.router_bias:
            raise ConfigError(
                "weighed shared experts are beside others in no groups, which sparsemixer does not "
                f"choose, without a bias of the router: got groups={self.groups}, "
                f"scoring={self.scoring!r}, router_bias={self.router_bias}"
            )
        super().__post_init__()

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        for piece in self.expert.parameter_groups(embed_dim):
            yield replace(piece, size=self.num_shared * piece.size)
        yield ParameterGroup("feed_forward", 1, self.num_shared * embed_dim, as_numbers=True)
