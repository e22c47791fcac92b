"""What GGUF files of the ``gemma3`` architecture say beside the settings of every decoder."""

from __future__ import annotations

import math
from dataclasses import replace

from polyhead.checkpoints import gemma
from polyhead.checkpoints.keys import Keys
from polyhead.checkpoints.shared_keys import SLIDING
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)

_LAYERS_OF_27B = 62


def as_gemma(config: TransformerConfig, keys: Keys) -> TransformerConfig:
    """A Llama-like configuration with Gemma 3's layers.

    Args:
        config: Read from the settings that all architectures share.
        keys: The settings under the architecture's prefix.

    Raises:
        ConfigError: A setting is missing or impossible, by name.
    """
    count, norm = len(config.layers), gemma.norm_of(config.layers[0].norm.eps)
    window = keys.whole("attention.sliding_window")
    pattern = keys.whole("attention.sliding_window_pattern", gemma.DEFAULT_PATTERN)
    local = RopeConfig(keys.number("rope.freq_base_swa", gemma.LOCAL_THETA))

    def layer(plain: LayerConfig, kind: str) -> LayerConfig:
        attention, network = plain.attention, plain.feed_forward
        if not isinstance(attention, AttentionConfig) or not isinstance(network, FeedForwardConfig):
            return plain
        # The format does not say the scale. One size, known by its depth alone, has another than
        # the usual; llama.cpp decides the same way.
        share = config.embed_dim / attention.num_heads
        attention = replace(
            attention,
            qk_norm=QKNormConfig(norm),
            scale=gemma.scale_of(share, attention.head_dim) if count == _LAYERS_OF_27B else None,
        )
        if kind == SLIDING:
            attention = replace(attention, rope=local, window=window)
        return replace(
            plain,
            attention=attention,
            feed_forward=replace(network, activation="gelu_tanh"),
            norm=norm,
            norm_placement="sandwich",
        )

    kinds = gemma.layer_types(count, pattern)
    return replace(
        config,
        max_positions=keys.whole("context_length"),
        layers=tuple(map(layer, config.layers, kinds)),
        embedding=EmbeddingConfig(scale=math.sqrt(config.embed_dim)),
        final_norm=norm,
        logit_softcap=keys.number("final_logit_softcapping", None),
    )
