"""A gate of what a norm gives, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.data import Data, check_whole
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class NormGateConfig(Data):
    """y · σ(W silu(W' y)) in the place of y, which the norm before a part gives (A.X K2).

    Attributes:
        rank: Features between W' and W.
        feed_forward: Whether there is one before the network too, not before attention alone.

    Raises:
        ConfigError: A rank below 1.
    """

    rank: int
    feed_forward: bool = True

    def __post_init__(self) -> None:
        check_whole("norm_gate rank", self.rank)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a layer that read what is gated."""
        return ("attention", "feed_forward") if self.feed_forward else ("attention",)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters."""
        yield ParameterGroup("feed_forward", 1, len(self.parts) * 2 * self.rank * embed_dim)

    def peak_activation_elements(self, embed_dim: int, *, half: bool) -> int:
        """Elements for a token: what is gated, the gate and their product, in float32."""
        return (7 if half else 3) * embed_dim + self.rank
