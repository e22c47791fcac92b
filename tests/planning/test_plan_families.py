"""Parameters equal those of transformers' own modules, tiny and full-size, and of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_facts import TINY, TINY_LATENT

from polyhead.config import EmbeddingConfig, TransformerConfig
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
from polyhead.planning.architecture import Architecture
from polyhead.planning.weights import counts, of_attention, pieces

_SMALL = {k: v for k, v in TINY.items() if k != "model_type"}
_PLAIN = {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}
_SIDES = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
}
_MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"attention_bias": True, "mlp_bias": True},
    "mistral": _SMALL | {"head_dim": 16},
    "mixtral": _SMALL,
    "qwen2": _SMALL,
    "qwen2_moe": _SMALL | _MOE | {"shared_expert_intermediate_size": 24},
    "qwen3": _SMALL | {"head_dim": 16},
    "qwen3_moe": _SMALL | _MOE | {"head_dim": 16, "mlp_only_layers": [1]},
    "gemma": _SMALL | {"head_dim": 16},
    "gemma2": _SMALL | {"head_dim": 16},
    "gemma3_text": _SMALL | {"head_dim": 16},
    "phi3": _SMALL | {"pad_token_id": 0},
    "olmo2": _SMALL,
    "gpt_oss": _SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v2": {k: v for k, v in TINY_LATENT.items() if k != "model_type"},
    "deepseek_v3": {k: v for k, v in TINY_LATENT.items() if k != "model_type"}
    | {"q_lora_rank": None, "attention_bias": True},
    "gpt2": {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": _PLAIN,
    "falcon": {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "bert": _PLAIN,
    "bart": _SIDES,
    "marian": _SIDES | {"pad_token_id": 0, "decoder_start_token_id": 0},
}


def theirs(config: dict[str, Any]) -> int:
    """Parameters of transformers' module, made without memory, and of its correction biases."""
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    kind = transformers.AutoModelForCausalLM
    if config["model_type"] in ("bart", "marian"):
        kind = transformers.AutoModelForSeq2SeqLM
    if config["model_type"] == "bert":
        kind = transformers.AutoModel
    with torch.device("meta"):
        model = kind.from_config(made)
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return total + sum(
        b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_have_transformers_parameters(name: str) -> None:
    config = {"model_type": name} | FAMILIES[name]
    assert plan(config, tokens=8).parameters.total == theirs(config)


def test_falcon_with_one_kv_head() -> None:
    config = {"model_type": "falcon"} | FAMILIES["falcon"]
    del config["num_kv_heads"], config["new_decoder_architecture"]
    made = plan(config, tokens=8)
    assert made.cache_layers[0].attention == "MQA"
    assert made.parameters.total == theirs(config)


@pytest.mark.parametrize(
    "name", ["gpt2", "falcon-40b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2", "qwen2.5-7b"]
)
def test_presets_have_transformers_parameters(name: str) -> None:
    preset = presets()[name]
    assert plan(name, tokens=8).parameters.total == theirs(dict(preset.config))


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
    ]


@pytest.mark.parametrize("config", our_configs(), ids=lambda config: config.kind)
def test_our_models_have_the_planned_parameters_by_part(config: TransformerConfig) -> None:
    assert counts(pieces(Architecture.of(config))) == Transformer(config).parameter_counts()


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
    planned = sum(piece.count for piece in of_attention(layer.config, 32))
    assert planned == sum(p.numel() for p in layer.parameters())


def test_an_unknown_family_is_read_like_llama_and_says_so() -> None:
    made = plan(TINY | {"model_type": "novel"}, tokens=8)
    assert made.parameters == plan(TINY, tokens=8).parameters
    assert any("'novel' is not known" in note for note in made.notes)
    assert not plan(TINY, tokens=8).notes
