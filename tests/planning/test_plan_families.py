"""Parameters equal those of models of full size, transformers' and ours; tiny: tests/families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyhead.config import (
    CrossLayerAttentionConfig,
    EmbeddingConfig,
    EncoderConfig,
    HeadTransformConfig,
    RelativeBiasConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.layers import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MultiHeadLatentAttention,
    NormConfig,
    QKNormConfig,
)
from polyhead.models import Transformer
from polyhead.planning import plan, presets
from polyhead.planning.weights import counts, parameter_groups


def theirs(config: dict[str, Any]) -> int:
    """Parameters of transformers' module, made without memory."""
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "name", ["gpt2", "falcon-40b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2", "qwen2.5-7b"]
)
def test_presets_have_transformers_parameters(name: str) -> None:
    preset = presets()[name]
    assert plan(name, tokens=8).parameters.total == theirs(dict(preset.config))


@pytest.mark.parametrize(
    "name",
    # Each takes half a second where a model has hundreds of experts.
    [
        name if place % 3 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for place, name in enumerate(presets())
    ],
)
def test_presets_have_the_parameters_of_our_models(name: str) -> None:
    """One layer of each sort in full size, made without memory; all where one reads another's."""
    config = presets()[name].model
    kinds, encoder = (tuple(dict.fromkeys(each)) for each in (config.layers, config.encoder_layers))
    if not any(isinstance(each.attention, CrossLayerAttentionConfig) for each in kinds):
        config = replace(config, layers=kinds, encoder_layers=encoder)
    with torch.device("meta"):
        model = Transformer(config)
    assert counts(parameter_groups(config)) == model.parameter_counts()


def our_configs() -> list[TransformerConfig]:
    layer_norm = NormConfig("layernorm", bias=True)
    heads = AttentionConfig(4, 2, 8, qk_norm=QKNormConfig(), sinks=True, qkv_bias=True)
    full = AttentionConfig(4, 2, 8, v_head_dim=6, qk_norm=QKNormConfig(place="full_width"))
    plain = AttentionConfig(4, 4, 8, qkv_bias=True, out_bias=True)
    gated = FeedForwardConfig(48)
    wide = FeedForwardConfig(40, gated=False, bias=True)
    return [
        TransformerConfig(
            "decoder", 50, 32, 64, (LayerConfig(heads, gated), LayerConfig(full, wide))
        ),
        TransformerConfig(
            "encoder",
            50,
            32,
            64,
            (LayerConfig(plain, wide, layer_norm, "post"),) * 2,
            embedding=EmbeddingConfig("learned", num_segments=2, norm=layer_norm),
            final_norm=None,
            head=None,
        ),
        TransformerConfig(
            "encoder-decoder",
            50,
            32,
            64,
            (LayerConfig(plain, wide, layer_norm, "sandwich", cross_attention=plain),) * 2,
            encoder_layers=(LayerConfig(plain, wide, layer_norm),) * 3,
            final_norm=layer_norm,
            head="untied",
            head_bias=True,
        ),
        TransformerConfig(
            "encoder-decoder",
            50,
            32,
            64,
            (LayerConfig(plain, wide, layer_norm, cross_attention=plain),),
            encoder_layers=(LayerConfig(plain, wide, layer_norm),),
            embedding=EmbeddingConfig("learned"),
            encoder=EncoderConfig(embedding=EmbeddingConfig("learned", norm=layer_norm)),
            head=None,
            task=TaskHeadConfig("mean", 3, (HeadTransformConfig(norm=layer_norm),)),
        ),
        TransformerConfig(
            "encoder-decoder",
            50,
            32,
            64,
            (LayerConfig(plain, wide, layer_norm, cross_attention=plain),) * 3,
            encoder_layers=(LayerConfig(plain, wide, layer_norm),) * 2,
            relative_bias=RelativeBiasConfig(per_layer=True),
            encoder=EncoderConfig(relative_bias=RelativeBiasConfig(16)),
        ),
        TransformerConfig(
            "encoder",
            50,
            32,
            64,
            (LayerConfig(plain, wide, layer_norm),),
            head="untied",
            head_transforms=(HeadTransformConfig(24, norm=layer_norm),),
        ),
    ]


@pytest.mark.parametrize("config", our_configs(), ids=lambda config: config.kind)
def test_our_models_have_the_planned_parameters_by_part(config: TransformerConfig) -> None:
    assert counts(parameter_groups(config)) == Transformer(config).parameter_counts()


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_latent_layer_has_the_planned_parameters(q_lora_rank: int | None) -> None:
    layer = MultiHeadLatentAttention(
        32,
        4,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        q_lora_rank=q_lora_rank,
        bias=True,
    )
    planned = sum(piece.count for piece in layer.config.parameter_groups(32))
    assert planned == sum(p.numel() for p in layer.parameters())
