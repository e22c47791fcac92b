"""Attention whose scores depend on content by distance, as plain data (DeBERTa)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import Data, check_share, check_whole
from polyhead.config.layout import EMBEDDING, CallCost, Prefill, shared
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain
from polyhead.errors import ConfigError

DISTANCES = "relative_embedding"
"""What the model hands to layers that score distances."""


@dataclass(frozen=True)
class RelativeEmbeddingConfig(Data):
    """A learned vector ``[E]`` for each distance, which all layers project for themselves.

    Attributes:
        num_distances: Vectors n; the middle one is distance 0.
        max_distance: As of ``RelativeContentBias``: from where all are alike, if far distances
            share vectors; None: they do not.
        norm: Over the vectors.
        dropout: Of the vectors in every layer, when training.
    """

    num_distances: int
    max_distance: int | None = None
    norm: NormConfig | None = field(default=None)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_whole("relative embedding num_distances", self.num_distances)
        check_share("relative embedding dropout", self.dropout)
        if self.max_distance is None:
            return
        check_whole("relative embedding max_distance", self.max_distance)
        if self.num_distances % 4 or self.max_distance <= self.num_distances // 4 + 1:
            raise ConfigError(
                "relative embedding max_distance needs num_distances that are a multiple of 4, and "
                f"must be at least num_distances / 4 + 2: got num_distances={self.num_distances}, "
                f"max_distance={self.max_distance}"
            )

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters."""
        size = self.num_distances * embed_dim
        yield ParameterGroup("embedding", 1, size, multiplied=False)
        if self.norm is not None:
            yield ParameterGroup("norms", 1, self.norm.parameters(embed_dim), multiplied=False)


@dataclass(frozen=True)
class DisentangledAttentionConfig(AttentionConfig, kind="disentangled"):
    """``AttentionConfig`` of an encoder whose scores also compare queries and keys with distances.

    The model has ``relative_embedding``.

    Attributes:
        num_distances: Of the model's ``relative_embedding``.
        query_term: Whether queries are compared with distances as keys see them (c2p).
        key_term: Whether keys are compared with distances as queries see them (p2c).
        own_projections: Whether distances have projections of their own; else those of queries
            and keys project them (``share_att_key``).
    """

    num_distances: int = 512
    query_term: bool = True
    key_term: bool = True
    own_projections: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("num_distances", self.num_distances)
        check_plain(self, "scores by content and distance", allowed=("sinks", "chunk"))
        if not (self.query_term or self.key_term):
            raise ConfigError(
                "scores by content and distance need query_term, key_term or both: got neither"
            )

    @property
    def layout(self) -> str:
        return f"disentangled {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, and {self.num_distances} distances"

    @property
    def reads(self) -> Mapping[str, int]:
        return {DISTANCES: EMBEDDING}

    @property
    def terms(self) -> int:
        """Tables of distances that a call makes."""
        return self.query_term + self.key_term

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        if not self.own_projections:
            return
        for made, heads, bias in (
            (self.query_term, self.num_kv_heads, self.has_k_bias),
            (self.key_term, self.num_heads, self.qkv_bias),
        ):
            if made:
                yield ParameterGroup("attention", heads, self.head_dim * embed_dim)
            if made and bias:
                yield ParameterGroup("attention", heads, self.head_dim, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        plain = super().call_cost(batch_size, queries, cached)
        per_token = self.terms * self.num_heads * self.num_distances * self.head_dim
        return CallCost(plain.per_pair, per_token=per_token)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        # The tables, and the last one before it is scaled.
        return plain + (self.terms + 1) * shared(self.num_heads, call.ranks) * self.num_distances
