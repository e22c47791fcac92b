"""Residual streams that are read feature by feature, by weights of low rank, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from polyhead.config.data import check_choice, check_whole
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.streams import StreamsConfig


@dataclass(frozen=True)
class LowRankConnectionsConfig(StreamsConfig, kind="low_rank_connections"):
    """Gated residuals of Qwen4-Exp (2026): hyper-connections whose parts read each feature of the
    normed streams with a weight of its own.

    Attributes:
        rank: Features R that the weights are made from.
        norm: Over the features of each stream, with weights of its own.
    """

    around_layer: ClassVar[bool] = False
    norms_input: ClassVar[bool] = True

    count: int = 4
    rank: int = 320
    norm: NormConfig = field(default_factory=lambda: NormConfig(weight_offset=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("rank", self.rank)
        check_choice("norm type", self.norm.type, ("rmsnorm", "layernorm"))

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        width = self.count * embed_dim
        yield ParameterGroup("feed_forward", 1, (2 * self.rank + self.count) * width)
        size = self.norm.parameters(width)
        yield ParameterGroup("norms", 1, size, multiplied=False)

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        width = self.count * embed_dim
        yield ParameterGroup("embedding", 1, 2 * self.rank * width)
        yield ParameterGroup("norms", 1, self.norm.parameters(width), multiplied=False)

    def peak_activation_elements(self, embed_dim: int) -> int:
        # The streams, normed, their weights before and behind the sigmoid, and the products; or in
        # half precision what is normed, which goes through float32, beside streams of the layer.
        return (8 * self.count + 2) * embed_dim + 2 * self.rank
