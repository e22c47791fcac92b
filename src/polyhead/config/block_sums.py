"""Attention within a window and to sums of blocks of tokens, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig, RelativeBiasConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import HeadLayout, Prefill
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain, merged_elements
from polyhead.errors import ConfigError

SUMS_BIAS = "sums_bias"
"""What the layer that has the table hands on."""


@dataclass(frozen=True)
class BlockSumsAttentionConfig(AttentionConfig, kind="block_sums"):
    """``AttentionConfig`` of an encoder's window, which also sees the sum of every block of tokens.

    Keys and values of a sum, normalized, are made as those of a token. Their bias depends on how
    many blocks lie between; one table serves all layers.

    Attributes:
        block_size: Tokens of a block; those behind the last whole one count as the last block's.
        sums_norm: Over the sums.
        sums_bias: The table of blocks; ``per_layer`` has no meaning here.
        sums_bias_of: Number of the layer whose table it is; None: this one's.
    """

    block_size: int = 16
    sums_norm: NormConfig = field(default_factory=NormConfig)
    sums_bias: RelativeBiasConfig = field(default_factory=RelativeBiasConfig)
    sums_bias_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("block_size", self.block_size)
        check_plain(self, "sums of blocks")

    @property
    def layout(self) -> str:
        return f"block-sums {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, and sums of {self.block_size} tokens"

    @property
    def hands_on(self) -> frozenset[str]:
        return frozenset((SUMS_BIAS,)) if self.sums_bias_of is None else frozenset()

    @property
    def reads(self) -> Mapping[str, int]:
        return {} if self.sums_bias_of is None else {SUMS_BIAS: self.sums_bias_of}

    def check_source(self, what: str, source: HeadLayout) -> None:
        if source.num_heads != self.num_heads:
            raise ConfigError(
                f"the table of sums is for {source.num_heads} heads: got {self.num_heads}"
            )

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("norms", 1, self.sums_norm.parameters(embed_dim), multiplied=False)
        if self.sums_bias_of is None:
            buckets = self.sums_bias.num_buckets
            yield ParameterGroup("attention", self.num_heads, buckets, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        return plain + merged_elements(self, call.ranks)
