"""Latent attention to the keys that an indexer chooses, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.latent import Computation, ComputationCost, LatentAttentionConfig
from polyhead.config.layout import AttentionSpan, CallCost, Prefill, shared
from polyhead.config.memories import Memory, PerToken, Pooled, Tail
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class IndexerConfig(Data):
    """The lightning indexer (DeepSeek-V3.2, 2025, arXiv 2512.02556, eq. 1).

    Attributes:
        num_heads: Its query heads, which share one key per token.
        head_dim: Features of its queries and keys.
        top_k: Keys that a query chooses.
        norm: Over the features of a key.
        rotates: Which features of its queries and keys are rotated: the ``"first"``, or the
            ``"last"`` (HY 4).
        pool: Its keys are means of so many tokens with weights that it learns, and a query chooses
            ``top_k / pool`` whole pools; tokens behind the last whole one it sees too (GLM-5.3).
            None: one key for each token.

    Raises:
        ConfigError: A size below 1, or a ``top_k`` that is no multiple of ``pool``.
    """

    num_heads: int = 64
    head_dim: int = 128
    top_k: int = 2048
    norm: NormConfig = field(default_factory=lambda: NormConfig("layernorm", eps=1e-6, bias=True))
    rotates: Literal["first", "last"] = "first"
    pool: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "top_k"):
            check_whole(name, getattr(self, name))
        check_choice("rotates", self.rotates, ("first", "last"))
        if self.pool is not None:
            check_whole("pool", self.pool, least=2)
            if self.top_k % self.pool:
                raise ConfigError(f"top_k must be a multiple of pool={self.pool}: got {self.top_k}")

    @property
    def most_keys(self) -> int:
        """Keys that a query reads at most."""
        return self.top_k + (0 if self.pool is None else self.pool - 1)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """What it remembers."""
        if self.pool is None:
            return (PerToken(1, self.head_dim, self.head_dim, latent=True, name="index"),)
        tail = Tail("unpooled", 2 * self.head_dim, self.pool - 1)
        return (tail, Pooled("index", self.head_dim, self.pool))

    def parameter_groups(self, embed_dim: int, query_dim: int) -> Iterator[ParameterGroup]:
        """Its projections and norm; queries are made from ``query_dim`` features."""
        yield ParameterGroup("attention", 1, self.num_heads * self.head_dim * query_dim)
        yield ParameterGroup("attention", 1, (self.head_dim + self.num_heads) * embed_dim)
        yield ParameterGroup("norms", 1, self.norm.parameters(self.head_dim), multiplied=False)
        if self.pool is not None:
            yield ParameterGroup("attention", 1, self.head_dim * embed_dim)
            yield ParameterGroup("attention", self.pool, self.head_dim, multiplied=False)


@dataclass(frozen=True)
class SparseLatentAttentionConfig(LatentAttentionConfig, kind="sparse_latent"):
    """``LatentAttentionConfig`` with an indexer: DeepSeek sparse attention (V3.2).

    The indexer makes its queries from the latent of queries, so ``q_lora_rank`` is needed, and
    rotates ``qk_rope_head_dim`` features of its queries and keys.

    Attributes:
        indexer: Its sizes; of a layer that reads a selection ``top_k`` alone counts.
        selection_of: Number of an earlier layer whose selection this one reads, in place of an
            indexer (GLM-5; 2026, arXiv 2603.12201); None: its own.
        gated: Whether heads' outputs are multiplied by the sigmoid of a projection of the input
            (HY 4).
        gate_per: Whether a gate is of each ``"feature"`` of a head, or of each ``"head"``
            (dots3.note).
        sinks: Whether a learned number of each head joins the softmax's denominator (HY 4).
        query_gate: Whether queries are made from their latent both normed and as projected, and
            beside them what heads' outputs are multiplied by the sigmoid of (A.X K2).

    Raises:
        ConfigError: No ``q_lora_rank``, fewer features in the indexer than are rotated, or two
            gates.
    """

    indexer: IndexerConfig = field(default_factory=IndexerConfig)
    selection_of: int | None = None
    gated: bool = False
    sinks: bool = False
    gate_per: Literal["feature", "head"] = "feature"
    query_gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gate_per", self.gate_per, ("feature", "head"))
        if self.latent_heads > 1:
            raise ConfigError(
                f"queries choose of one latent head's keys: got latent_heads={self.latent_heads}"
            )
        if self.window is not None:
            raise ConfigError(f"queries that choose have no window: got window={self.window}")
        if self.q_lora_rank is None:
            raise ConfigError(
                "q_lora_rank must be a whole number: the indexer makes its queries from that "
                "latent: got None"
            )
        if self.gated and self.query_gate:
            raise ConfigError("heads have one gate: got gated=True and query_gate=True")
        if self.rope is not None and self.indexer.head_dim < self.qk_rope_head_dim:
            raise ConfigError(
                f"the indexer's head_dim must be at least qk_rope_head_dim={self.qk_rope_head_dim}"
                f", the features that are rotated: got {self.indexer.head_dim}"
            )
        if self.rope is not None and self.indexer.pool is not None:
            raise ConfigError(
                f"an indexer with pools has no positions: got rope with pool={self.indexer.pool}"
            )

    @property
    def query_features(self) -> int:
        """Features that queries, and their gates, are made from."""
        return (self.q_lora_rank or 0) * (1 + self.query_gate)

    @property
    def layout(self) -> str:
        return f"sparse MLA, top {self.indexer.top_k}"

    @property
    def described(self) -> str:
        return f"{super().described}, the {self.indexer.top_k} keys that an indexer chooses"

    @property
    def gate_dim(self) -> int:
        """Gates of a head, where there are."""
        return self.v_head_dim if self.gate_per == "feature" else 1

    @property
    def hands_on(self) -> frozenset[str]:
        return frozenset(() if self.selection_of is not None else ("selection",))

    @property
    def reads(self) -> Mapping[str, int]:
        return {} if self.selection_of is None else {"selection": self.selection_of}

    @property
    def memories(self) -> tuple[Memory, ...]:
        if self.selection_of is not None:
            return super().memories
        return (*super().memories, *self.indexer.memories)

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(chosen=self.indexer.most_keys)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        if self.gated:
            yield ParameterGroup("attention", self.num_heads, self.gate_dim * embed_dim)
        if self.query_gate:
            more = self.qk_head_dim + 2 * self.gate_dim  # the others are the plain layer's
            yield ParameterGroup("attention", self.num_heads, more * (self.q_lora_rank or 0))
        if self.sinks:
            yield ParameterGroup("attention", self.num_heads, 1, multiplied=False)
        if self.selection_of is not None:
            return
        yield from self.indexer.parameter_groups(embed_dim, self.q_lora_rank or 0)

    def cost(
        self, computation: Computation, batch_size: int, queries: int, keys: int
    ) -> ComputationCost:
        every = super().cost(computation, batch_size, queries, keys)
        skipped = batch_size * queries * max(0, keys - self.indexer.most_keys)
        return ComputationCost(
            every.flops - 2 * skipped * self._per_pair(computation), every.elements
        )

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        dense = super().call_cost(batch_size, queries, cached)
        index = self.indexer
        choice = index.num_heads * index.head_dim if self.selection_of is None else 0
        choice = -(-choice // (index.pool or 1))
        return CallCost(dense.per_pair, dense.remade, per_choice=choice)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        index = self.indexer
        dense = super().peak_activation_elements(embed_dim, call)
        made = 2 * index.num_heads * index.head_dim + 4 * index.head_dim + index.num_heads
        if index.pool is not None:  # tokens by pools, and their weights, in float32
            made += (16 if call.half else 8) * index.head_dim
        values = shared(self.num_heads, call.ranks) * self.v_head_dim
        gate = 2 * values * self.gated
        if self.query_gate:  # in float32, and so what it multiplies
            gate = self.query_features + (6 if call.half else 2) * values
        # Beside q and latents the indexer's queries, then the numbers of the chosen keys, which
        # have 64 bits, twice while they are sorted.
        return dense + gate + max(made, 4 * min(index.top_k, call.tokens))
