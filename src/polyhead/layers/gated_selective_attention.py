"""Attention to chosen blocks of keys whose outputs are gated (Qwen4-Exp, 2026)."""

from __future__ import annotations

from typing import ClassVar

from polyhead.config import AttentionConfig, GatedSelectiveAttentionConfig
from polyhead.layers.gated_attention import GatedAttention
from polyhead.layers.registry import register_builder
from polyhead.layers.selective_attention import SelectiveAttention


class GatedSelectiveAttention(SelectiveAttention, GatedAttention):
    """``SelectiveAttention`` with the gates of ``GatedAttention``; built from its config."""

    config_class: ClassVar[type[AttentionConfig]] = GatedSelectiveAttentionConfig
    config: GatedSelectiveAttentionConfig

    def _add_modules(self) -> None:
        GatedAttention._add_modules(self)
        SelectiveAttention._add_modules(self)


register_builder(GatedSelectiveAttentionConfig, GatedSelectiveAttention.from_config)
