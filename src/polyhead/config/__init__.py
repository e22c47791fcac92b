"""Configurations: pure data that says everything a model's arithmetic depends on.

They know nothing of layers, caches or files; all of those are built from them.
"""

from polyhead.config.attention import AttentionConfig, QKNormConfig
from polyhead.config.data import Data
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.latent import LatentAttentionConfig
from polyhead.config.layer import LayerConfig
from polyhead.config.layout import CacheShape, CallCost, HeadLayout, Network
from polyhead.config.mixture import MixtureConfig
from polyhead.config.norm import NormConfig
from polyhead.config.pieces import Piece
from polyhead.config.rope import RopeConfig, RopeType
from polyhead.config.transformer import EmbeddingConfig, TransformerConfig

__all__ = [
    "AttentionConfig",
    "CacheShape",
    "CallCost",
    "Data",
    "EmbeddingConfig",
    "FeedForwardConfig",
    "HeadLayout",
    "LatentAttentionConfig",
    "LayerConfig",
    "MixtureConfig",
    "Network",
    "NormConfig",
    "Piece",
    "QKNormConfig",
    "RopeConfig",
    "RopeType",
    "TransformerConfig",
]
