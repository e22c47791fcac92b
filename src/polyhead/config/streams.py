"""Several residual streams between layers, as plain data.

A part of a model, a layer or one of a layer's own parts, reads one vector of each token from n
streams, and what it gives is written back into all of them. A new way to do that is a subclass of
``StreamsConfig`` with its name in ``StreamsConfig.where``, and two modules (``layers/streams.py``).

Letters: n streams, E embed size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from polyhead.config.data import OneOfSeveral, check_positive, check_whole
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class StreamsConfig(OneOfSeveral, ABC):
    """How layers read and write several residual streams, of any kind.

    Attributes:
        count: Streams n, at least 2; a kind of one stream has no dimension for it.
    """

    where: ClassVar[Mapping[str, str]] = {
        "altup": "polyhead.config.streams",
        "hyper_connections": "polyhead.config.hyper_connections",
        "mixed_connections": "polyhead.config.hyper_connections",
        "low_rank_connections": "polyhead.config.low_rank_connections",
        "cycles": "polyhead.config.cycles",
        "reversible": "polyhead.config.reversible",
        "scaled_residual": "polyhead.config.scaled_residual",
    }
    around_layer: ClassVar[bool]
    """Whether a layer reads the streams once; else each of its parts does."""
    norms_input: ClassVar[bool] = False
    """Whether what is read of the streams is normed, so that parts have no norms before them."""

    count: int

    def __post_init__(self) -> None:
        check_whole("streams count", self.count, least=2)

    @property
    def between(self) -> StreamsConfig:
        """What is the same in all layers of a model."""
        return self

    def last_dim(self, embed_dim: int) -> int:
        """Features of the one vector that is made of the streams at last."""
        return embed_dim

    @abstractmethod
    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters of one module that reads and writes the streams."""

    @abstractmethod
    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters that make the streams of the embedding, and one vector of them at last."""

    @abstractmethod
    def peak_activation_elements(self, embed_dim: int) -> int:
        """Elements per token that reading, writing or joining streams holds at a time, at most."""

    def held_activation_elements(self, embed_dim: int) -> int:
        """Elements per token that are kept while a part computes: the streams before and after."""
        return 2 * self.count * embed_dim


@dataclass(frozen=True)
class AltUpConfig(StreamsConfig, kind="altup"):
    """Alternating updates (Baykal et al. 2023, arXiv 2301.13310), as Gemma 3n has them.

    A layer computes one stream; the others are predicted before it and corrected by what it
    changed, with factors that depend on the token.

    Attributes:
        active: Which stream a layer computes, from 0.
        clip: Largest size of the coefficients when training; None: any.
        norm: Over what the factors are made of.
    """

    around_layer: ClassVar[bool] = True

    count: int = 4
    active: int = 0
    clip: float | None = 120.0
    norm: NormConfig = field(default_factory=NormConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("active", self.active, least=0)
        if self.active >= self.count:
            raise ConfigError(f"active must be one of {self.count} streams: got {self.active}")
        if self.clip is not None:
            check_positive("clip", self.clip)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        n = self.count
        yield ParameterGroup("feed_forward", 1, n * embed_dim + n * n * n + n * n)
        yield ParameterGroup("norms", 1, self.norm.parameters(embed_dim), multiplied=False)

    def end_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield ParameterGroup("embedding", 1, 2 * (self.count - 1) * embed_dim * embed_dim)

    def peak_activation_elements(self, embed_dim: int) -> int:
        return (4 * self.count + 2) * embed_dim
