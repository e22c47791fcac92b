"""Attention within chunks of tokens sorted by hashes, as plain data (Reformer)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import AttentionSpan
from polyhead.config.memories import Memory, PerToken
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class LshAttentionConfig(AttentionConfig, kind="lsh"):
    """Causal attention by locality-sensitive hashes (Kitaev et al. 2020, arXiv 2001.04451).

    Queries are keys too. In each round tokens are sorted by the bucket of a hash and cut into
    chunks; a query sees the earlier tokens of its own chunk and of those before it. Where chunks
    end depends on all tokens of a call, later ones too.

    Attributes:
        chunk_length: Tokens of a chunk; a text of no more is one chunk, in its own order.
        look_back: Chunks before its own that a query sees.
        num_buckets: Buckets of a hash, or factors of them, each even.
        num_hashes: Rounds.
        hash_seed: Of the normal numbers that hashes are made of.
        local_chunk: Length of chunks in other layers of the model, of which padding makes whole
            ones too; None: there are none.

    Raises:
        ConfigError: Sizes below 1, an odd number of buckets, or what these heads cannot have.
    """

    chunk_length: int = 64
    look_back: int = 1
    num_buckets: tuple[int, ...] = (64,)
    num_hashes: int = 1
    hash_seed: int = 0
    local_chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plain(self, "heads that hash")
        for name in ("chunk_length", "num_hashes"):
            check_whole(name, getattr(self, name))
        for name in ("look_back", "hash_seed"):
            check_whole(name, getattr(self, name), least=0)
        if self.local_chunk is not None:
            check_whole("local_chunk", self.local_chunk)
        for size in self.num_buckets or (0,):
            check_whole("num_buckets", size)
            if size % 2:
                raise ConfigError(f"num_buckets must be even numbers: got {self.num_buckets}")
        plain = self.num_kv_heads == self.num_heads and self.value_dim == self.head_dim
        if not plain or self.window is not None or self.softcap is not None or self.qkv_bias:
            raise ConfigError(
                "heads that hash have a key and a value each, as large as queries, without "
                f"window, softcap or qkv_bias: got num_heads={self.num_heads}, num_kv_heads="
                f"{self.num_kv_heads}, v_head_dim={self.v_head_dim}, window={self.window}, "
                f"softcap={self.softcap}, qkv_bias={self.qkv_bias}"
            )

    @property
    def layout(self) -> str:
        return f"LSH {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, in chunks of {self.chunk_length} sorted by hashes"

    @property
    def one_pass(self) -> str:
        return "later tokens change which keys a token sees, so that it has other keys in a cache"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return ()

    @property
    def projected_kv(self) -> PerToken:
        return PerToken(self.num_heads, self.head_dim, self.head_dim)

    @property
    def makes_keys(self) -> bool:
        return False  # apart from queries

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(chosen=self.num_hashes * (1 + self.look_back) * self.chunk_length)

    def padded(self, tokens: int) -> int:
        """So many tokens, filled up to whole chunks of all layers."""
        whole = math.lcm(self.chunk_length, self.local_chunk or self.chunk_length)
        return -(-tokens // whole) * whole

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, self.head_dim * embed_dim)
