"""One residual stream that learned vectors scale, as plain data (ZAYA1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.streams import StreamsConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ScaledResidualConfig(StreamsConfig, kind="scaled_residual"):
    """x ← (x + b) · a + (f(x) + d) · c with learned vectors a, b, c and d, for each part f of a
    layer. The stream is float32 whatever the weights are (ZAYA1, Zyphra 2025, arXiv 2511.17127).

    Attributes:
        count: 1; the stream has no dimension of its own for it.
    """

    around_layer: ClassVar[bool] = False

    count: int = 1

    def __post_init__(self) -> None:
        if self.count != 1:
            raise ConfigError(f"a scaled residual is one stream: got count={self.count}")

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield ParameterGroup("feed_forward", 1, 4 * embed_dim, multiplied=False)

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield ParameterGroup("embedding", 1, 2 * embed_dim, multiplied=False)

    def peak_activation_elements(self, embed_dim: int) -> int:
        # The embedding, moved, scaled, and in float32.
        return 5 * embed_dim

    def held_activation_elements(self, embed_dim: int) -> int:
        # Beside what came in and goes on, counted as of the weights' size, the rest of float32 and
        # what is moved and scaled.
        return 4 * embed_dim
