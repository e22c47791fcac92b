"""Attention within a window, with tokens that see all and are seen by all, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import EMBEDDING, GLOBAL_TOKENS, Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain, merged_elements
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class GlobalWindowAttentionConfig(AttentionConfig, kind="global_window"):
    """``AttentionConfig`` of an encoder's window, with projections of their own for global tokens.

    A call names its global tokens. ``window`` and ``window_ahead`` say what the others see beside
    them.

    Attributes:
        global_first: Whether the first token is global where a call names none.
    """

    global_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None:
            raise ConfigError("global tokens beside a window need a window: got None")
        check_plain(self, "global tokens beside a window")

    @property
    def layout(self) -> str:
        return f"global {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, and global tokens"

    @property
    def reads(self) -> Mapping[str, int]:
        return {GLOBAL_TOKENS: EMBEDDING}

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        for heads, size, bias in (
            (self.num_heads, self.head_dim, self.qkv_bias),
            (self.num_kv_heads, self.head_dim, self.has_k_bias),
            (self.num_kv_heads, self.value_dim, self.qkv_bias),
        ):
            yield ParameterGroup("attention", heads, size * embed_dim)
            if bias:
                yield ParameterGroup("attention", heads, size, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        again = shared(self.num_kv_heads, call.ranks) * (self.head_dim + self.value_dim)
        return plain + max(again, merged_elements(self, call.ranks))
