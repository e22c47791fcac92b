"""Gated attention whose queries choose blocks of keys, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.gated_attention import GatedAttentionConfig
from polyhead.config.selective_attention import SelectiveAttentionConfig


@dataclass(frozen=True)
class GatedSelectiveAttentionConfig(
    SelectiveAttentionConfig, GatedAttentionConfig, kind="gated_selective"
):
    """``SelectiveAttentionConfig`` with the gates of ``GatedAttentionConfig`` (Qwen4-Exp)."""
