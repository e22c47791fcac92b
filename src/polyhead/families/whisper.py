"""Whisper (Radford et al. 2022): mel features in, text out."""

from __future__ import annotations

from typing import Any

from polyhead.config import AudioConfig, EmbeddingConfig, EncoderConfig, TransformerConfig
from polyhead.families import bart
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder
from polyhead.families.common.tensors import Rule, Tensors


def read(keys: Keys) -> TransformerConfig:
    encoder, decoder = bart.read_layers(keys, first=True, k_bias=False)
    dropout = keys.number("hidden_dropout_prob")
    sound = EmbeddingConfig(
        "learned", frontend=AudioConfig(keys.whole("num_mel_bins")), dropout=dropout
    )
    return read_decoder(
        keys,
        decoder,
        kind="encoder-decoder",
        max_positions=keys.whole("max_position_embeddings"),
        norm=bart.NORM,
        embedding=EmbeddingConfig("learned", dropout=dropout),
        encoder_layers=tuple(encoder),
        encoder=EncoderConfig(sound, max_positions=keys.whole("max_source_positions")),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    frontend: Any = config.encoder.embedding and config.encoder.embedding.frontend
    return {
        **bart.write(config),
        "num_mel_bins": frontend.num_mel_bins,
        "max_source_positions": config.encoder.max_positions,
    }


FAMILIES = (
    Family(
        "whisper",
        "Whisper",
        read,
        Tensors(
            (
                Rule("decoder.embed_tokens", "embedding.tokens"),
                Rule("encoder.conv1", "encoder_embedding.frontend.conv1"),
                Rule("encoder.conv2", "encoder_embedding.frontend.conv2"),
                *bart.stacks(),
            ),
            outside=(Rule("proj_out", "head"),),
        ),
        initial_key="init_std",
        defaults={
            **bart.DEFAULTS,
            "hidden_dropout_prob": 0.0,
            "pad_token_id": 50_256,
            "bos_token_id": 50_256,
            "eos_token_id": 50_256,
        },
        write=write,
        aliases=bart.ALIASES | {"max_position_embeddings": "max_target_positions"},
        not_supported=bart.NOT_SUPPORTED,
        harmless=frozenset(
            (
                "encoder_layerdrop",
                "decoder_layerdrop",
                "init_std",
                "scale_embedding",  # the classes do not read it
                "use_weighted_layer_sum",  # of classification
                "classifier_proj_size",
                "apply_spec_augment",  # when training
                "mask_time_prob",
                "mask_time_length",
                "mask_time_min_masks",
                "mask_feature_prob",
                "mask_feature_length",
                "mask_feature_min_masks",
                "median_filter_width",  # of the times of words
                "forced_decoder_ids",
                "num_hidden_layers",
            )
        ),
        with_head="ForConditionalGeneration",
    ),
)
