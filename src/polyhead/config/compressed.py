"""Attention to a window and to blocks that the layer compresses itself, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig, greatest_divisor
from polyhead.config.data import check_share, check_whole
from polyhead.config.layout import AttentionSpan, CallCost, HeadLayout, Prefill, shared
from polyhead.config.memories import Memory, PerToken, Pooled, Recent, Tail
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_latent import IndexerConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class CompressedAttentionConfig(HeadLayout, kind="compressed"):
    """One layer of DeepSeek-V4 (2026): in one softmax its last keys and blocks of all earlier ones.

    All heads share one key per token, which is also its value. A block of tokens becomes one such
    key, a mean of its tokens with learned weights. The layer is causal, and has sinks.

    Attributes:
        head_dim: Features D of a query, a key and a value.
        q_lora_rank: Size of the latent that queries are made from, those of the indexer too.
        rotated: How many of the last features of a query and a key are rotated. Those of what the
            heads give are rotated back, as keys are values.
        window: Keys of the window, a query's own included.
        out_groups: Groups of heads that are projected apart, to ``out_rank`` features each, before
            all of them together are.
        out_rank: Features of a group.
        block_size: Tokens of a block; None: the layer reads its window alone.
        overlap: Whether a block's key is also made of the tokens of the block before.
        indexer: Chooses ``top_k`` blocks for each query, with compressed keys of its own; None:
            queries read all blocks.
        norm: Over the latent, keys and blocks; without its weight over each head's query.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    head_dim: int
    q_lora_rank: int
    rotated: int
    window: int
    out_groups: int
    out_rank: int
    block_size: int | None = None
    overlap: bool = False
    indexer: IndexerConfig | None = None
    norm: NormConfig = field(default_factory=lambda: NormConfig(eps=1e-6))

    def __post_init__(self) -> None:
        for name in (
            "num_heads", "head_dim", "q_lora_rank", "rotated", "window", "out_groups", "out_rank",
        ):  # fmt: skip
            check_whole(name, getattr(self, name))
        check_share("dropout", self.dropout)
        if self.rotated % 2 or self.rotated > self.head_dim:
            raise ConfigError(
                f"rotated must be an even number up to head_dim={self.head_dim}: got {self.rotated}"
            )
        if self.num_heads % self.out_groups:
            raise ConfigError(
                f"out_groups must divide num_heads={self.num_heads}: got {self.out_groups}"
            )
        if self.rope is not None and self.rope.dim not in (None, self.rotated):
            raise ConfigError(
                f"rope dim must be rotated={self.rotated} or None: got {self.rope.dim}"
            )
        if self.block_size is None:
            if self.overlap or self.indexer is not None:
                raise ConfigError("overlap and indexer need a block_size: got None")
            return
        check_whole("block_size", self.block_size, least=2)
        index = self.indexer
        if index is None:
            return
        if index.pool is not None:
            raise ConfigError(f"blocks are the indexer's pools already: got pool={index.pool}")
        if index.rotates != "last" or index.head_dim < self.rotated:
            raise ConfigError(
                f"the indexer rotates its last rotated={self.rotated} features: got rotates="
                f"{index.rotates!r}, head_dim={index.head_dim}"
            )

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope_head_dim(self) -> int:
        return self.rotated

    @property
    def span(self) -> int:
        """Tokens that a block's key is made of; 0 without blocks."""
        return (self.block_size or 0) * self._series

    @property
    def _series(self) -> int:
        """Keys that a token makes for blocks: one for its own, one for the next where it counts."""
        return 2 if self.overlap else 1

    @property
    def layout(self) -> str:
        if self.block_size is None:
            return "MQA"
        return f"MQA, blocks of {self.block_size}"

    @property
    def described(self) -> str:
        words = f"MQA {self.num_heads} query / 1 kv heads × {self.head_dim}, window {self.window}"
        if self.block_size is None:
            return words
        which = "" if self.indexer is None else f"{self.indexer.top_k} that they choose of "
        return f"{words}, {which}blocks of {self.block_size} compressed"

    @property
    def memories(self) -> tuple[Memory, ...]:
        D, m = self.head_dim, self.block_size
        if m is None:
            return (PerToken(1, D, D, latent=True),)
        found: list[Memory] = [
            Recent(1, D, D, latent=True, window=self.window),
            Tail("uncompressed", 2 * self._series * D, self.span - 1),
            Pooled("compressed", D, m),
        ]
        if self.indexer is not None:
            size = self.indexer.head_dim
            found += [
                Tail("unindexed", 2 * self._series * size, self.span - 1),
                Pooled("index", size, m),
            ]
        return tuple(found)

    @property
    def attention_span(self) -> AttentionSpan:
        if self.block_size is None:
            return AttentionSpan(window=self.window)
        # Single keys are read as far as the window reaches; ``call_cost`` counts blocks.
        return AttentionSpan(chosen=self.window)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        E, H, D, R = embed_dim, self.num_heads, self.head_dim, self.q_lora_rank
        norm = self.norm.parameters
        yield ParameterGroup("attention", 1, R * E)
        yield ParameterGroup("attention", H, D * R)
        yield ParameterGroup("attention", 1, D * E)
        yield ParameterGroup("norms", 1, norm(R) + norm(D), multiplied=False)
        yield ParameterGroup("attention", 1, H * D * self.out_rank, as_numbers=True)
        yield ParameterGroup("attention", 1, self.out_groups * self.out_rank * E)
        yield ParameterGroup("attention", H, 1, multiplied=False)
        if self.block_size is None:
            return
        yield from self._pooling(E, D)
        if (index := self.indexer) is not None:
            yield ParameterGroup("attention", 1, index.num_heads * (index.head_dim * R + E))
            yield from self._pooling(E, index.head_dim)

    def _pooling(self, E: int, size: int) -> Iterator[ParameterGroup]:
        """What makes keys of blocks: two projections, positions within a block, a norm."""
        width = self._series * size
        yield ParameterGroup("attention", 1, 2 * width * E)
        yield ParameterGroup("attention", 1, (self.block_size or 0) * width, multiplied=False)
        yield ParameterGroup("norms", 1, self.norm.parameters(size), multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        per_pair, m = 2 * self.num_heads * self.head_dim, self.block_size
        if m is None:
            return CallCost(per_pair)
        seen = _blocks(cached + queries, m) - _blocks(cached, m)
        read, choice = seen, 0
        if (index := self.indexer) is not None:
            most = index.top_k
            # Blocks beyond the most that a query reads, as if they began that much later.
            read -= _blocks(cached + queries - most * m, m) - _blocks(cached - most * m, m)
            choice = seen * index.num_heads * index.head_dim
        return CallCost(per_pair, per_token=(per_pair * read + choice) // queries)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        Q = shared(self.num_heads, call.ranks) * self.head_dim
        blocks = chosen = 0
        if (m := self.block_size) is not None:
            # What blocks are made of lies there as it came, by blocks, and with its weights.
            blocks = 6 * self._series**2 * self.head_dim
            if (index := self.indexer) is not None:
                blocks += index.num_heads * (index.head_dim + 1)
                chosen = 2 * (2 if call.half else 1) * min(index.top_k, -(-call.tokens // m))
        # Beside queries: their norm, or two states twice in float32 while they are merged.
        merged = (5 if call.half else 3) if m is None else (10 if call.half else 6)
        widest = max(merged * Q, blocks + 4 * chosen) + chosen
        return Q + widest + self.q_lora_rank + 2 * self.head_dim + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        most = greatest_divisor(self.num_heads, num_kv_heads)
        return AttentionConfig(self.num_heads, most, self.head_dim, rope=self.rope)


def _blocks(tokens: int, size: int) -> int:
    """Whole blocks that the first so many tokens see, counted for each of them."""
    whole, rest = divmod(max(tokens + 1, 0), size)
    return size * whole * (whole - 1) // 2 + whole * rest
