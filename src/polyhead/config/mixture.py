"""A mixture of experts as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import Network
from polyhead.config.pieces import Piece
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class MixtureConfig(Network, kind="mixture"):
    """The experts and how tokens choose among them.

    Attributes:
        expert: Each of the routed experts.
        num_experts: X.
        experts_per_token: K.
        shared: The network that every token visits, or None.
        scoring: ``"softmax"`` (Mixtral, DeepSeek-V2) or ``"sigmoid"`` (DeepSeek-V3).
        choice_bias: A number per expert that is added for the choice alone (DeepSeek-V3).
        normalise: Weights of the chosen experts sum to 1.
        scale: Factor of the routed experts' sum.
        groups: Experts are in so many groups, and
        groups_per_token: a token chooses within so many of them.
        group_score: What makes a group good: its best expert, or its best two together.

    Raises:
        ConfigError: Numbers that do not go together.
    """

    expert: FeedForwardConfig
    num_experts: int
    experts_per_token: int
    shared: FeedForwardConfig | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["best", "best two"] = "best"

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"scoring must be 'softmax' or 'sigmoid': got {self.scoring!r}")
        if self.group_score not in ("best", "best two"):
            raise ConfigError(f"group_score must be 'best' or 'best two': got {self.group_score!r}")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ConfigError(
                f"groups must divide num_experts={self.num_experts}: got {self.groups}"
            )
        if not 1 <= self.groups_per_token <= self.groups:
            raise ConfigError(
                f"groups_per_token must be 1 to groups={self.groups}: got {self.groups_per_token}"
            )
        if self.group_score == "best two" and self.num_experts // self.groups < 2:
            raise ConfigError(
                f"group_score 'best two' needs at least 2 experts in a group: got num_experts="
                f"{self.num_experts}, groups={self.groups}"
            )
        within = self.num_experts // self.groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= within:
            raise ConfigError(
                f"experts_per_token must be 1 to the {within} experts that a token may choose "
                f"from: got {self.experts_per_token}"
            )

    def pieces(self, embed_dim: int) -> Iterator[Piece]:
        X = self.num_experts
        for piece in self.expert.pieces(embed_dim):
            yield replace(piece, size=X * piece.size, experts=X, visited=self.experts_per_token)
        yield Piece("feed_forward", 1, X * embed_dim)
        if self.choice_bias:
            yield Piece("feed_forward", 1, X, multiplied=False)
        if self.shared is not None:
            yield from self.shared.pieces(embed_dim)

    def alive_elements(self, embed_dim: int, ranks: int) -> int:
        # At worst every token visits the same expert. Beside one at work lie its input, the sum so
        # far and the last expert's output; the next sum takes that output twice more, once in
        # float32.
        E, routed = embed_dim, self.expert.alive_elements(embed_dim, ranks)
        after = 0 if self.shared is None else 2 * E + self.shared.alive_elements(E, ranks)
        return max(3 * E + routed, 5 * E, after)

    def widths(self) -> Mapping[str, int]:
        found = dict(self.expert.widths())
        if self.shared is not None:
            found |= {f"shared_{name}": width for name, width in self.shared.widths().items()}
        return found
