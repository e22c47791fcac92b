"""Tiny random models of every kind of layer, for what saves and changes activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import polyhead as ph
from arrangements import GEMMA, LATENT, LLAMA, T5
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.layers import DifferentialAttentionConfig, GatedAttentionConfig, Mamba2Config
from random_models import WORDS

SMALL = AttentionConfig(4, 2, 8, rope=RopeConfig())
PLAIN = LayerConfig(SMALL, FeedForwardConfig(40))
BERT = LayerConfig(
    AttentionConfig(4, 4, 8, qkv_bias=True, out_bias=True),
    FeedForwardConfig(40, "gelu", gated=False, bias=True),
    NormConfig("layernorm", bias=True),
    "post",
)


def _decoder(*layers: LayerConfig, **options: Any) -> TransformerConfig:
    return TransformerConfig("decoder", WORDS, 32, 64, layers, **options)


CONFIGS: dict[str, Callable[[], TransformerConfig]] = {
    "llama": lambda: _decoder(LLAMA, LLAMA),
    "gemma": lambda: _decoder(GEMMA, replace(GEMMA, attention=replace(GEMMA.attention, window=5))),
    "sinks": lambda: _decoder(replace(PLAIN, attention=replace(SMALL, sinks=True)), PLAIN),
    "parallel": lambda: _decoder(*[replace(PLAIN, parallel="one norm")] * 2),
    "olmo": lambda: _decoder(*[replace(PLAIN, norm_placement="after")] * 2, logit_softcap=20.0),
    "granite": lambda: _decoder(*[replace(PLAIN, residual_scale=0.5)] * 2),
    "experts": lambda: _decoder(
        PLAIN, replace(PLAIN, feed_forward=MixtureConfig(FeedForwardConfig(16), 4, 2))
    ),
    "latent": lambda: _decoder(*[replace(PLAIN, attention=LATENT)] * 2),
    "gated": lambda: _decoder(
        replace(PLAIN, attention=GatedAttentionConfig(4, 2, 8)),
        replace(PLAIN, attention=DifferentialAttentionConfig(4, 2, 8)),
    ),
    "states": lambda: _decoder(
        LayerConfig(Mamba2Config(4, 2, 8, 6), None), PLAIN, LayerConfig(SMALL, None)
    ),
    "shared": lambda: _decoder(PLAIN, PLAIN, PLAIN, weights_of=(0, 0, 2)),
    "bert": lambda: TransformerConfig(
        "encoder", WORDS, 32, 64, (BERT, BERT), final_norm=None, head=None,
        embedding=EmbeddingConfig(positions="learned", norm=NormConfig("layernorm", bias=True)),
    ),
    "t5": lambda: TransformerConfig(
        "encoder-decoder", WORDS, 32, 64, (T5, T5),
        encoder_layers=(replace(T5, cross_attention=None),) * 2,
        relative_bias=RelativeBiasConfig(8, 20),
    ),
}  # fmt: skip


def made(kind: str) -> ph.Transformer:
    """The model of a kind, with weights large enough for outputs that differ clearly."""
    torch.manual_seed(3)
    model = ph.Transformer(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def texts(kind: str, seed: int = 0, batch: int = 2, tokens: int = 9) -> dict[str, Tensor]:
    """What a model of a kind is called with."""
    generator = torch.Generator().manual_seed(seed)
    given = {"ids": torch.randint(0, WORDS, (batch, tokens), generator=generator)}
    if kind == "t5":
        given["encoder_ids"] = torch.randint(0, WORDS, (batch, 7), generator=generator)
    return given
