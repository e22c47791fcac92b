"""Hyper-connections between residual streams, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyhead.config.data import check_choice, check_positive, check_whole
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.streams import StreamsConfig


@dataclass(frozen=True)
class HyperConnectionsConfig(StreamsConfig, kind="hyper_connections"):
    """Independent hyper-connections (Zhu et al. 2024, arXiv 2409.19606), as HY 4 has them.

    Each part of a layer reads a weighted sum of the streams, and its output is added to every
    stream with a weight of its own; the weights depend on all streams of the token.

    Attributes:
        magnitude: Largest weight of what is added to a stream.
        eps: Added to the weights.
        norm_eps: Of the RMSNorm over all streams that weights are made from.
    """

    around_layer: ClassVar[bool] = False

    count: int = 4
    magnitude: float = 2.0
    eps: float = 1e-6
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("magnitude", "norm_eps"):
            check_positive(name, getattr(self, name))

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        n = self.count
        yield ParameterGroup("feed_forward", 1, 2 * n * n * embed_dim, as_numbers=True)
        yield ParameterGroup("feed_forward", 1, 2 * n + 2, multiplied=False)

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        n = self.count
        yield ParameterGroup("embedding", 1, n * n * embed_dim, as_numbers=True)
        yield ParameterGroup("embedding", 1, n + 1, multiplied=False)

    def peak_activation_elements(self, embed_dim: int) -> int:
        # The streams, what is read or added, both in float32, and what is written.
        return 5 * self.count * embed_dim

    def held_activation_elements(self, embed_dim: int) -> int:
        # Weights of half precision are made and applied in float32.
        return 6 * self.count * embed_dim


@dataclass(frozen=True)
class MixedConnectionsConfig(HyperConnectionsConfig, kind="mixed_connections"):
    """Manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880), as DeepSeek-V4
    has them.

    What a part reads and writes is weighed as in ``HyperConnectionsConfig``, but for ``eps``, which
    is not added to weights of what is written. The streams themselves are mixed by a matrix that
    depends on the token, whose rows and columns sum to 1.

    Attributes:
        iterations: Times that columns are scaled to sum to 1, with rows between (Sinkhorn and
            Knopp). ``eps`` is added to sums too.
        at_end: What the model gives of the streams: a sum with ``"weights"`` that are made as a
            part's, or their ``"mean"`` (GLM-5.3).
    """

    iterations: int = 20
    at_end: Literal["weights", "mean"] = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("iterations", self.iterations)
        check_choice("at_end", self.at_end, ("weights", "mean"))

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        n = self.count
        rows = 2 * n + n * n
        yield ParameterGroup("feed_forward", 1, rows * n * embed_dim, as_numbers=True)
        yield ParameterGroup("feed_forward", 1, rows + 3, multiplied=False)

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        if self.at_end == "weights":
            yield from super().end_parameter_groups(embed_dim)
