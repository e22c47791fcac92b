"""One Transformer layer as plain data: which attention, which feed-forward network, which norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import Data
from polyhead.config.layout import HeadLayout, Network
from polyhead.config.norm import NormConfig


@dataclass(frozen=True)
class LayerConfig(Data):
    """One Transformer layer.

    ``norm_placement``: ``"pre"`` x + f(norm(x)); ``"post"`` norm(x + f(x)) (the 2017 paper, BERT);
    ``"sandwich"`` x + norm(f(norm(x))) (Gemma 2 and 3).
    """

    attention: HeadLayout
    feed_forward: Network
    norm: NormConfig = field(default_factory=NormConfig)
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    cross_attention: AttentionConfig | None = None
    dropout: float = 0.0
