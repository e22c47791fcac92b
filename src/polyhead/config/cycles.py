"""Stacks of layers that take turns over two residual streams, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from polyhead.config.data import check_whole
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.streams import StreamsConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class CyclesConfig(StreamsConfig, kind="cycles"):
    """A slow state and a fast one, which two stacks of layers compute in turn (HRM, Wang et al.
    2025, arXiv 2506.21734; HRM-Text).

    Attributes:
        computes: The state of this layer: 0 the slow one, which at first is the embedding and at
            last is given; 1 the fast one, which at first is a stored vector.
        starts: Whether the layer is the first of a turn, which reads the sum of both states.
        ends: Whether it is the last of a turn, behind which the state is normed.
        norm: That norm, without a weight.
    """

    around_layer: ClassVar[bool] = True

    count: int = 2
    computes: int = 0
    starts: bool = False
    ends: bool = False
    norm: NormConfig = field(default_factory=lambda: NormConfig(weight=False))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("computes", self.computes, least=0)
        if self.count != 2 or self.computes > 1 or self.norm.weight:
            raise ConfigError(
                "cycles are over 2 states, of which a layer computes 0 or 1, with a norm without a "
                f"weight: got count={self.count}, computes={self.computes}, norm={self.norm}"
            )

    @property
    def between(self) -> CyclesConfig:
        return replace(self, computes=0, starts=False, ends=False)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from ()

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield ParameterGroup("embedding", 1, embed_dim, multiplied=False)

    def peak_activation_elements(self, embed_dim: int) -> int:
        return 2 * self.count * embed_dim
