"""Self- and cross-attention in one softmax, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import Prefill, shared
from polyhead.config.sparse_encoder import check_plain, merged_elements
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class MergedAttentionConfig(AttentionConfig, kind="merged"):
    """``AttentionConfig`` of an encoder-decoder's decoder whose keys are its tokens and a context.

    ``window`` is among the tokens, every query sees the whole context. ``rope`` is of the queries
    and the tokens' keys; those of the context are not rotated.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_ahead is not None:
            raise ConfigError(
                f"merged heads are a decoder's, without window_ahead: got {self.window_ahead}"
            )
        check_plain(self, "merged heads", allowed=("window", "rope", "qk_norm"))

    @property
    def layout(self) -> str:
        return f"merged {super().layout}"

    @property
    def of_context(self) -> AttentionConfig:
        return AttentionConfig(
            self.num_heads, self.num_kv_heads, self.head_dim, v_head_dim=self.v_head_dim
        )

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        keys = shared(self.num_kv_heads, call.ranks) * (self.head_dim + self.value_dim)
        return plain + keys + merged_elements(self, call.ranks)
