"""Attention with queries and outputs of experts that each token chooses, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ExpertHeadsAttentionConfig(AttentionConfig, kind="expert_heads"):
    """``AttentionConfig`` with a mixture of experts in place of the projections around attention.

    Every expert has a query head for each kv head, and those of the ``num_heads / num_kv_heads``
    experts that a token visits are its query heads.

    Attributes:
        num_experts: Number of experts X.
    """

    num_experts: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("num_experts", self.num_experts)
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts must be at least the {self.experts_per_token} experts that a token "
                f"visits: got {self.num_experts}"
            )
        for name in ("qkv_bias", "qk_norm", "values_from_keys", "query_temperature", "v_norm"):
            if getattr(self, name):
                raise ConfigError(
                    f"heads of experts go without {name}: got {getattr(self, name)!r}"
                )

    @property
    def experts_per_token(self) -> int:
        """Experts that a token visits."""
        return self.num_heads // self.num_kv_heads

    @property
    def layout(self) -> str:
        return f"experts' {super().layout}"

    @property
    def described(self) -> str:
        chosen = f"{self.experts_per_token} of {self.num_experts} experts"
        return f"{super().described}, made by {chosen}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        E, G, X, visits = embed_dim, self.num_kv_heads, self.num_experts, self.experts_per_token
        yield ParameterGroup("attention", 1, X * E, as_numbers=True)
        for size in (self.head_dim, self.value_dim):  # into the heads, and out of them
            yield ParameterGroup(
                "attention", G, X * size * E, as_numbers=True, experts=X, visited=visits
            )
        for size, bias in ((self.head_dim, self.has_k_bias), (self.value_dim, False)):
            yield ParameterGroup("attention", G, size * E)
            if bias:
                yield ParameterGroup("attention", G, size, multiplied=False)
        if self.out_bias:
            yield ParameterGroup("attention", 1, E, multiplied=False)
        if self.sinks:
            yield ParameterGroup("attention", self.num_heads, 1, multiplied=False)

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        """The same: every expert has a query head for each kv head."""
        return self

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        # Rows for each expert that a token visits, sorted and in the order of tokens.
        rows = shared(self.num_heads, call.ranks) * max(self.head_dim, self.value_dim)
        return plain + 2 * self.experts_per_token * embed_dim + 2 * rows
