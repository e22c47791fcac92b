"""Configurations: pure data that says everything a model's arithmetic depends on.

They know nothing of layers, caches or files; all of those are built from them.
"""

from polyhead.config.attention import AttentionConfig, QKNormConfig
from polyhead.config.data import Data
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.latent import LatentAttentionConfig
from polyhead.config.layer import LayerConfig
from polyhead.config.mixture import MixtureConfig
from polyhead.config.norm import NormConfig
from polyhead.config.rope import RopeConfig, RopeType
from polyhead.config.transformer import EmbeddingConfig, TransformerConfig

__all__ = [
    "AttentionConfig",
    "Data",
    "EmbeddingConfig",
    "FeedForwardConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "MixtureConfig",
    "NormConfig",
    "QKNormConfig",
    "RopeConfig",
    "RopeType",
    "TransformerConfig",
]
