"""Attention within neighbouring blocks, the first and the last block global, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import AttentionSpan, Prefill
from polyhead.config.sparse_encoder import check_plain, merged_elements
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class GlobalBlocksAttentionConfig(AttentionConfig, kind="global_blocks"):
    """``AttentionConfig`` of an encoder whose tokens see three blocks and two global ones.

    Attributes:
        block_size: Tokens of a block.
        first_again: How many times more the keys of the first block count for tokens outside the
            first and the last block. Texts of up to 5 + 2 · ``first_again`` blocks are seen whole.
    """

    block_size: int = 64
    first_again: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("block_size", self.block_size)
        check_whole("first_again", self.first_again, least=0)
        check_plain(self, "global blocks")
        if self.window is not None:
            raise ConfigError(f"global blocks have no window: got {self.window}")

    @property
    def most_seen_whole(self) -> int:
        """Tokens of a text up to which every token sees all."""
        return (5 + 2 * self.first_again) * self.block_size

    @property
    def attention_span(self) -> AttentionSpan:
        # Five blocks, but no fewer than what a short text is seen by.
        return AttentionSpan(chosen=self.most_seen_whole)

    @property
    def layout(self) -> str:
        return f"global-blocks {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, blocks of {self.block_size} tokens"

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        return plain + merged_elements(self, call.ranks)
