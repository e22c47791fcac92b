"""Attention by softmax-off-by-one, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class OffByOneAttentionConfig(AttentionConfig, kind="off_by_one"):
    """``AttentionConfig`` whose softmax has 1 more in its denominator."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks:
            raise ConfigError("softmax-off-by-one is a sink of its own: got sinks=True")

    @property
    def layout(self) -> str:
        return f"off-by-one {super().layout}"
