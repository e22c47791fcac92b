"""Native sparse attention (NSA), as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import AttentionSpan, CallCost, Prefill
from polyhead.config.memories import Memory, PerToken, Pooled, Recent, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class NativeSparseAttentionConfig(AttentionConfig, kind="native_sparse"):
    """Native sparse attention (Yuan et al. 2025, arXiv 2502.11089): three branches, gated by head.

    Each query reads compressed blocks, the blocks of keys that it chooses, and its last keys. Each
    branch has keys and values of its own. The layer is causal. Sizes are the paper's by default.

    Attributes:
        block_size: Tokens of a compressed block (l), a multiple of ``stride``.
        stride: Tokens from one compressed block to the next (d).
        compression_dim: Hidden features of the networks that compress; None: ``head_dim``.
        selected_size: Keys of a block that is chosen (l'), a multiple of ``stride``, at least
            ``block_size``.
        top_k: Blocks that the heads of a kv head choose together (n), those counted that are
            always chosen.
        first_blocks: Blocks at the beginning that are always chosen.
        last_blocks: Blocks up to a query's own that are always chosen.
        last_keys: Keys of the window, a query's own included (w).

    Raises:
        ConfigError: Sizes that do not go together, or what the branches do not have: ``window``,
            ``chunk``, ``softcap``, ``sinks``, ``alibi``, ``values_from_keys``, ``hands_on_keys``.
    """

    block_size: int = field(default=32, kw_only=True)
    stride: int = field(default=16, kw_only=True)
    compression_dim: int | None = field(default=None, kw_only=True)
    selected_size: int = field(default=64, kw_only=True)
    top_k: int = field(default=16, kw_only=True)
    first_blocks: int = field(default=1, kw_only=True)
    last_blocks: int = field(default=2, kw_only=True)
    last_keys: int = field(default=512, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stride", "selected_size", "top_k", "last_blocks", "last_keys"):
            check_whole(name, getattr(self, name))
        check_whole("block_size", self.block_size, least=2)
        check_whole("first_blocks", self.first_blocks, least=0)
        if self.compression_dim is not None:
            check_whole("compression_dim", self.compression_dim)
        if self.block_size % self.stride or self.selected_size % self.stride:
            raise ConfigError(
                f"stride must divide block_size={self.block_size} and selected_size="
                f"{self.selected_size}: got {self.stride}"
            )
        if self.selected_size < self.block_size:
            raise ConfigError(
                f"selected_size must be at least block_size={self.block_size}: got "
                f"{self.selected_size}"
            )
        if self.top_k < self.first_blocks + self.last_blocks:
            raise ConfigError(
                f"top_k must be at least first_blocks + last_blocks="
                f"{self.first_blocks + self.last_blocks}, which are always chosen: got {self.top_k}"
            )
        for name, off in _ABSENT.items():
            if (value := getattr(self, name)) != off:
                raise ConfigError(f"native sparse attention has no {name}: got {value}")

    @property
    def hidden_dim(self) -> int:
        """Hidden features of the networks that compress."""
        return self.head_dim if self.compression_dim is None else self.compression_dim

    @property
    def layout(self) -> str:
        return f"NSA {super().layout}"

    @property
    def described(self) -> str:
        return (
            f"{super().described}, {self.top_k} blocks of {self.selected_size} keys that they "
            f"choose, blocks of {self.block_size} compressed, the last {self.last_keys} keys"
        )

    @property
    def memories(self) -> tuple[Memory, ...]:
        sizes = self.num_kv_heads, self.head_dim, self.value_dim
        width = self._entry_elements
        return (
            PerToken(*sizes),
            Recent(*sizes, name="window", window=self.last_keys),
            Tail("uncompressed", width, self.block_size - 1),
            Pooled("compressed", width, self.stride),
        )

    @property
    def _entry_elements(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(chosen=self.top_k * self.selected_size)

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        G, H = self.num_kv_heads, self.num_heads
        sides = ((self.head_dim, self.has_k_bias), (self.value_dim, self.qkv_bias))
        for size, bias in sides * 2:  # of the compressed branch and of the window
            yield ParameterGroup("attention", G, size * embed_dim)
            if bias:
                yield ParameterGroup("attention", G, size, multiplied=False)
        yield ParameterGroup("attention", H, 3 * embed_dim)
        for size, _ in sides:
            # ``call_cost`` counts what they multiply: not each token has a block of its own.
            made = self._compression(size) + self.block_size * size
            yield ParameterGroup("attention", 1, made, multiplied=False)

    def _compression(self, size: int) -> int:
        """Weights of the network that compresses blocks of heads of this size."""
        return (self.block_size + 1) * size * self.hidden_dim

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        per_pair, w = super().call_cost(batch_size, queries, cached).per_pair, self.last_keys
        # Queries at positions from ``cached`` on see as many keys as they have, at most w.
        growing = min(max(w - cached, 0), queries)
        recent = growing * cached + growing * (growing + 1) // 2 + (queries - growing) * w
        made = self._compression(self.head_dim) + self._compression(self.value_dim)
        return CallCost(
            per_pair,
            per_token=per_pair * recent // queries + self.num_kv_heads * made // self.stride,
            per_choice=-(-per_pair // self.stride),
        )

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        Q, KV, V = self.num_heads * self.head_dim, self._entry_elements, self.value_dim
        wide = 2 if call.half else 1
        lists = 5 * 2 * wide * min(self.top_k, -(-call.tokens // self.selected_size))
        # Blocks overlap: each token is in block_size / stride of them, copied once and rearranged.
        blocks = 2 * KV * (self.block_size // self.stride)
        # The sum, a branch's heads, and one more of each while they are made or added.
        outs = 4 * self.num_heads * V + embed_dim + self.num_kv_heads * lists
        return Q + 3 * KV + max(self._copies(call.half) * Q, blocks, outs)


_ABSENT: dict[str, Any] = {
    "window": None,
    "chunk": None,
    "softcap": None,
    "sinks": False,
    "alibi": None,
    "values_from_keys": False,
    "hands_on_keys": False,
}
"""Fields of ``AttentionConfig`` that must stay as they are."""
