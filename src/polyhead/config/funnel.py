"""Blocks of an encoder of which each reads half as many tokens, as plain data (Funnel)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.layout import Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.relative_attention import RelativeAttentionConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class FunnelConfig(Data):
    """How an encoder's layers are divided into blocks; the layers are ``FunnelAttentionConfig``'s.

    From the second block on, a block's first layer has queries of pairs of tokens.

    Attributes:
        blocks: Layers of each block.
        decoder: Layers behind the blocks. They read every token again: what the blocks gave for its
            group, and what the first block gave for the token; None: the result is the groups'.
        pooling: What stands for a pair.
        first_apart: The first token is never in a pair, and has no scores of distances and segments
            with others.
        truncate: With ``first_apart``: the last token is left out, so that 2^n tokens give pairs.
        queries_only: Keys and values of a block's first layer are of single tokens, not of pairs.
    """

    blocks: tuple[int, ...]
    decoder: int | None = 2
    pooling: Literal["mean", "max"] = "mean"
    first_apart: bool = True
    truncate: bool = True
    queries_only: bool = True

    def __post_init__(self) -> None:
        check_choice("funnel pooling", self.pooling, ("mean", "max"))
        if not self.blocks:
            raise ConfigError("a funnel needs blocks: got none")
        for count in self.blocks:
            check_whole("funnel blocks", count)
        if self.decoder is not None:
            check_whole("funnel decoder", self.decoder, least=0)
        if self.truncate and not self.first_apart:
            raise ConfigError("a funnel with truncate=True needs first_apart=True: got False")

    @property
    def strides(self) -> tuple[int, ...]:
        """For each layer how many tokens stand for one key."""
        found: list[int] = []
        for i, count in enumerate(self.blocks):
            first = 2 ** max(i - 1, 0) if self.queries_only else 2**i
            found += [first] + [2**i] * (count - 1)
        return (*found, *[1] * (self.decoder or 0))


@dataclass(frozen=True)
class FunnelAttentionConfig(RelativeAttentionConfig, kind="funnel"):
    """``RelativeAttentionConfig`` of a funnel's layers: biases of keys and values, none of queries.

    Raises:
        ConfigError: As ``RelativeAttentionConfig``, or other biases.
    """

    k_bias: bool | None = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qkv_bias or not self.k_bias or self.max_distance is not None:
            raise ConfigError(
                "a funnel's heads have biases of keys and values and every distance: got "
                f"qkv_bias={self.qkv_bias}, k_bias={self.k_bias}, "
                f"max_distance={self.max_distance}"
            )

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_kv_heads, self.value_dim, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = AttentionConfig.peak_activation_elements(self, embed_dim, call)
        H = shared(self.num_heads, call.ranks)
        # Scores of 2 T distances, those of all pairs, of their segments, and the sum of the two;
        # the projected sinusoids.
        return plain + 5 * H * call.tokens + 2 * (embed_dim + H * self.head_dim)
