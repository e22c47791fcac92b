"""A mixture of experts as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from polyhead.config.data import check_choice, check_whole
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import Network
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class MixtureConfig(Network, kind="mixture"):
    """The experts and how tokens choose among them.

    Attributes:
        expert: Each of the routed experts.
        num_experts: Number of experts X.
        experts_per_token: Experts K that each token visits.
        shared: The network that every token visits, or None.
        shared_gate: The shared network's output is multiplied by sigmoid(x · w) (Qwen2-MoE).
        shared_scale: Factor of the shared network's output; with ``scale`` 1/2 too, the sum becomes
            an average (Cohere 2 MoE).
        router_bias: The router adds a learned number per expert (GPT-OSS).
        scoring: ``"softmax"`` (Mixtral, DeepSeek-V2), ``"sigmoid"`` (DeepSeek-V3, Llama 4),
            ``"sqrtsoftplus"`` (the root of softplus, DeepSeek-V4) or ``"sparsemixer"`` (PhiMoE: two
            experts; each weight is a softmax over the experts whose score is near the best of those
            left, see ``jitter``).
        jitter: For sparsemixer, experts count as near within 2 · jitter of the best, relatively.
        choice_bias: A number per expert that is added for the choice alone (DeepSeek-V3, GLM-4
            MoE, MiniMax-M2).
        choice_bias_of: What it is added to: the experts' ``"scores"``, or their ``"logits"``, by
            which they are then chosen (Kolibri 1).
        normalize: Weights of the chosen experts sum to 1. With softmax this is also the softmax
            over the chosen experts alone (GPT-OSS, Granite MoE).
        weighs: Whether weights multiply what experts give (``"output"``) or what they are given
            (``"input"``, Llama 4).
        output_bias: Whether a learned vector is added to the routed experts' sum (JetMoE).
        capacity: Tokens of a sequence that an expert takes in one call, first come first served;
            None: all (Switch Transformers has 64). A token that finds no room gets 0.
        scale: Factor of the routed experts' sum.
        groups: Experts are in so many groups, and
        groups_per_token: a token chooses within so many of them.
        group_score: What makes a group good: its best expert, or its best two together.
        closed_score: What experts outside those groups count as in the choice; None: they are never
            chosen. (0, which is above what a bias makes negative: A.X K2)

    Raises:
        ConfigError: Numbers that do not go together.
    """

    expert: FeedForwardConfig
    num_experts: int
    experts_per_token: int
    shared: FeedForwardConfig | None = None
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    choice_bias: bool = False
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["best", "best two"] = "best"
    shared_gate: bool = False
    router_bias: bool = False
    jitter: float = 0.0
    weighs: Literal["output", "input"] = "output"
    capacity: int | None = None
    shared_scale: float = 1.0
    choice_bias_of: Literal["scores", "logits"] = "scores"
    output_bias: bool = False
    closed_score: float | None = None

    def __post_init__(self) -> None:
        known = ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer")
        check_choice("scoring", self.scoring, known)
        check_choice("weighs", self.weighs, ("output", "input"))
        for network in (self.expert, self.shared):
            if network is not None and type(network) is not FeedForwardConfig:
                raise ConfigError(f"experts are plain networks: got a {type(network).__name__}")
        check_choice("choice_bias_of", self.choice_bias_of, ("scores", "logits"))
        if self.choice_bias_of == "logits" and not self.choice_bias:
            raise ConfigError("choice_bias_of 'logits' needs choice_bias: got choice_bias=False")
        if self.shared_gate and self.shared is None:
            raise ConfigError("shared_gate needs a shared network: got shared=None")
        if self.shared_scale != 1.0 and self.shared is None:
            raise ConfigError(
                f"shared_scale needs a shared network: got shared_scale={self.shared_scale} with "
                "shared=None"
            )
        if self.capacity is not None:
            check_whole("capacity", self.capacity)
        if self.jitter < 0 or (self.jitter and self.scoring != "sparsemixer"):
            raise ConfigError(
                f"jitter is at least 0 and belongs to scoring 'sparsemixer': got {self.jitter} "
                f"with {self.scoring!r}"
            )
        if self.scoring == "sparsemixer" and (
            self.experts_per_token > 2 or self.choice_bias or self.groups > 1 or self.normalize
        ):
            raise ConfigError(
                "sparsemixer chooses 1 or 2 experts without choice_bias, groups or normalize: got "
                f"experts_per_token={self.experts_per_token}, choice_bias={self.choice_bias}, "
                f"groups={self.groups}, normalize={self.normalize}"
            )
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
        within = self.choices // self.groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= within:
            raise ConfigError(
                f"experts_per_token must be 1 to the {within} experts that a token may choose "
                f"from: got {self.experts_per_token}"
            )

    @property
    def choices(self) -> int:
        """Experts that a token may choose from, those without a network included."""
        return self.num_experts

    def router_features(self, embed_dim: int) -> int:
        """Features that the router reads of a token."""
        return embed_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        X = self.num_experts
        for piece in self.expert.parameter_groups(embed_dim):
            yield replace(piece, size=X * piece.size, experts=X, visited=self.experts_per_token)
        read = self.router_features(embed_dim)
        yield ParameterGroup("feed_forward", 1, self.choices * read, as_numbers=True)
        for bias in (self.choice_bias, self.router_bias):
            if bias:
                yield ParameterGroup("feed_forward", 1, self.choices, multiplied=False)
        if self.output_bias:
            yield ParameterGroup("feed_forward", 1, embed_dim, multiplied=False)
        if self.shared is not None:
            yield from self.shared.parameter_groups(embed_dim)
            if self.shared_gate:
                yield ParameterGroup("feed_forward", 1, embed_dim)

    def peak_activation_elements(self, embed_dim: int, ranks: int) -> int:
        # At worst every token visits the same expert. Beside one at work lie its input, the sum so
        # far and the last expert's output; the next sum takes that output twice more, once in
        # float32.
        E, routed = embed_dim, self.expert.peak_activation_elements(embed_dim, ranks)
        after = 0 if self.shared is None else E + self.shared.peak_activation_elements(E, ranks)
        return max(3 * E + routed, 5 * E, after)

    def widths(self) -> Mapping[str, int]:
        found = dict(self.expert.widths())
        if self.shared is not None:
            found |= {f"shared_{name}": width for name, width in self.shared.widths().items()}
        return found
