"""Attention to the keys that values choose, as plain data (Doge)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_positive, check_whole
from polyhead.config.layout import AttentionSpan, CallCost, Prefill, shared
from polyhead.config.memories import Memory, PerToken
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class DynamicMaskConfig(AttentionConfig, kind="dynamic_mask"):
    """``AttentionConfig`` with a dynamic mask (Shi et al. 2025, arXiv 2508.02124; Doge).

    A token's values make a number for each kv head, which is added to the scores of its key. A
    query sees the ``top_k`` keys of highest number alone.

    Attributes:
        top_k: Keys that a query chooses of those that it would see.

    Raises:
        ConfigError: As ``AttentionConfig``, or a ``softcap``, which numbers do not pass through.
    """

    top_k: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("top_k", self.top_k)
        if self.scale is not None:
            check_positive("scale", self.scale)
        if self.softcap is not None or self.hands_on_keys:
            raise ConfigError(
                "a dynamic mask goes without softcap, and its keys are its own layer's: got "
                f"softcap={self.softcap}, hands_on_keys={self.hands_on_keys}"
            )

    @property
    def layout(self) -> str:
        return f"dynamic mask {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, the {self.top_k} keys of highest number"

    @property
    def memories(self) -> tuple[Memory, ...]:
        # The number of a key is one more feature of it.
        return (PerToken(self.num_kv_heads, self.head_dim + 1, self.value_dim),)

    @property
    def projected_kv(self) -> PerToken:
        return PerToken(self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(self.window, self.window_ahead, self.chunk, chosen=self.top_k)

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        G = self.num_kv_heads
        yield ParameterGroup("attention", G, G * self.value_dim)
        yield ParameterGroup("attention", G, 1 + self.qkv_bias, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        return CallCost(self.num_heads * (self.head_dim + 1 + self.value_dim))

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        # Queries and keys with one more feature beside those without; then the numbers of the
        # chosen keys, which have 64 bits, five times while they are sorted.
        wide = (H + G) * (self.head_dim + 1)
        chosen = 5 * (4 if call.half else 2) * G * min(self.top_k, call.tokens)
        return plain + max(wide, chosen if call.tokens > self.top_k else 0)
