"""Hybrid heads: attention and a Mamba-2 mixer that read the same input, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import CallCost, Prefill
from polyhead.config.mamba2 import Mamba2Config
from polyhead.config.memories import Memory
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class HybridHeadsConfig(AttentionConfig, kind="hybrid_heads"):
    """``AttentionConfig`` with a Mamba-2 mixer that reads the same x; their outputs are added.

    Attributes:
        mamba: The mixer.
        attention_scales: Factors of what the attention reads and of what it gives (Falcon-H1).
        mamba_scales: The same of the mixer.

    Raises:
        ConfigError: As ``AttentionConfig``.
    """

    mamba: Mamba2Config = field(kw_only=True)
    attention_scales: tuple[float, float] = field(default=(1.0, 1.0), kw_only=True)
    mamba_scales: tuple[float, float] = field(default=(1.0, 1.0), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_scales", "mamba_scales"):
            if len(scales := getattr(self, name)) != 2:
                raise ConfigError(f"{name} must be 2 factors, in and out: got {list(scales)}")

    @property
    def layout(self) -> str:
        return f"{super().layout} beside {self.mamba.layout}"

    @property
    def described(self) -> str:
        return f"{super().described} beside {self.mamba.described}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (*super().memories, *self.mamba.memories)

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield from self.mamba.parameter_groups(embed_dim)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        attention = super().call_cost(batch_size, queries, cached)
        state = self.mamba.call_cost(batch_size, queries, cached)
        return CallCost(attention.per_pair, per_token=state.per_token)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        attention = super().peak_activation_elements(embed_dim, call)
        mamba = self.mamba.peak_activation_elements(embed_dim, call)
        # What is read may be scaled; the mixer's output waits for the attention's.
        return embed_dim + max(mamba, embed_dim + attention)
