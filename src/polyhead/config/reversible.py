"""Two residual streams that parts of layers write in turn, as plain data (RevNet; Reformer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.streams import StreamsConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ReversibleConfig(StreamsConfig, kind="reversible"):
    """Reversible residual layers (Gomez et al. 2017, arXiv 1707.04585; Reformer).

    Each part of a layer reads the stream that was written last and adds to the other. Both begin
    as the embedding, and at last they stand side by side.
    """

    around_layer: ClassVar[bool] = False

    count: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count != 2:
            raise ConfigError(f"reversible layers have 2 streams: got count={self.count}")

    def last_dim(self, embed_dim: int) -> int:
        return self.count * embed_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from ()

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from ()

    def peak_activation_elements(self, embed_dim: int) -> int:
        return 2 * self.count * embed_dim
