"""Attention within blocks and to vectors in front of the tokens, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import Prefill
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain, merged_elements
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class GlobalPrefixAttentionConfig(AttentionConfig, kind="global_prefix"):
    """``AttentionConfig`` of an encoder: ``chunk`` cuts its tokens into blocks, behind a prefix.

    A token sees its own block and the prefix, a vector of the prefix sees everything. The layer's
    input is normalized here, since the prefix has a norm of its own.

    Attributes:
        prefix: Vectors in front of the tokens.
        stagger: The first block has so many tokens less.
        norm: Of the tokens, and of the prefix with other weights.
    """

    prefix: int = 32
    stagger: int = 0
    norm: NormConfig = field(default_factory=NormConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("prefix", self.prefix)
        if self.chunk is None or not 0 <= self.stagger < self.chunk:
            raise ConfigError(
                "a prefix in front of blocks needs chunk, and stagger below it: got chunk="
                f"{self.chunk}, stagger={self.stagger}"
            )
        check_plain(self, "a prefix in front of blocks", allowed=("chunk",))

    @property
    def layout(self) -> str:
        return f"global-prefix {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, blocks of {self.chunk} tokens and {self.prefix} vectors"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("norms", 1, 2 * self.norm.parameters(embed_dim), multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        return plain + merged_elements(self, call.ranks)
