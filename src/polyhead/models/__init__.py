"""Configurations, and the Transformers they describe."""

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.models.counts import ParameterCounts
from polyhead.models.multi_token_predictor import MultiTokenPredictor
from polyhead.models.observation import LayerOutput, Observation
from polyhead.models.transformer import Transformer

__all__ = [
    "AttentionConfig",
    "EmbeddingConfig",
    "FeedForwardConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "LayerOutput",
    "MixtureConfig",
    "MultiTokenPredictor",
    "NormConfig",
    "Observation",
    "ParameterCounts",
    "QKNormConfig",
    "RopeConfig",
    "Transformer",
    "TransformerConfig",
]
