"""config.json: every key is understood, known to be harmless, or an error by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_tiny import BERTS, DECODERS, DEEPSEEKS, GEMMAS

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families import read_config, write_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
BERT: dict[str, Any] = LLAMA | {"model_type": "bert"}


def _read(**changes: Any) -> TransformerConfig:
    return read_config({**LLAMA, **changes}, Path("config.json"))


def test_absent_keys_mean_what_the_family_says() -> None:
    config = _read()
    attention = config.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim) == (6, 8)
    assert attention.rope == RopeConfig(10_000.0)
    assert config.layers[0].norm.eps == 1e-6
    assert (config.head, config.bos_token_id, config.eos_token_ids) == ("untied", 1, (2,))
    mistral = _read(model_type="mistral", num_key_value_heads=2)
    assert mistral.layers[1].attention.window == 4096
    assert (
        _read(model_type="mistral", sliding_window=None, num_key_value_heads=2)
        .layers[0]
        .attention.window
        is None
    )
    assert _read(model_type="qwen3", num_key_value_heads=6).layers[0].attention.head_dim == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sink_size", 4),
        ("rope_fancy", True),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256),
        ("residual_multiplier", 0.2),
        ("sliding_window", 128),
    ],
)
def test_a_key_that_is_not_understood_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: key '{key}' .*not understood"):
        _read(**{key: value})


def test_bookkeeping_keys_are_harmless() -> None:
    noise = {
        "_name_or_path": "x",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "dtype": "float32",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
        "is_encoder_decoder": False,
    }
    assert _read(**noise) == _read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "novel"}, "model_type is 'novel'; supported are llama, "),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "perceiver"}, "'perceiver', which is not supported: its layers are over"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7; supported is a divisor of"),
        ({"num_key_value_heads": 4}, r"config\.json: num_kv_heads must divide num_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number: got '48'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; supported is 1 to 10000 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": True}, "vocab_size must be a whole number: got True"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false: got 'yes'"),
        ({"hidden_act": "snake"}, "hidden_act is 'snake'; supported is silu"),
        ({"rope_interleaved": True}, "rope_interleaved is True; supported is False"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a whole number or a list"),
        ({"rope_theta": "10k"}, "rope_theta must be a number: got '10k'"),
    ],
)
def test_impossible_and_unsupported_values_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _read(**change)


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"model_type"}))
def test_a_missing_key_is_named(key: str) -> None:
    values = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ConfigError, match=f"key '{key}' is missing"):
        read_config(values, "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"rope_theta": 1e4}, "key 'rope_theta' .*not understood"),
        ({"architectures": ["BertForMultipleChoice"]}, "architectures"),
    ],
)
def test_what_bert_does_not_have_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(BERT | change, "config.json")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope_type": "linear", "factor": 2.0, "fator": 3.0}, "key 'fator' .*not understood"),
        ({"rope_type": "spiral", "factor": 2.0}, "rope type must be one of default, linear"),
        ({"rope_type": "linear"}, "rope type 'linear' needs factor"),
        ({"rope_type": "default", "factor": 2.0}, "rope type 'default' does not read factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "does not read beta_fast"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number: got '2'"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "type is 'yarn'"),
        ({"rope_type": "llama3", "factor": 2.0}, "rope type 'llama3' needs low_freq_factor"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
            "'dynamic' starts from max_position_embeddings",
        ),
        (
            {"rope_type": "longrope", "factor": 2.0, "short_factor": "x", "long_factor": [1.0]},
            "short_factor is 'x'; supported is a list of numbers",
        ),
        ({"rope_theta": 1.0, "rope_type": "linear", "factor": 2.0}, "rope_theta is 1.0; .*5.0"),
        (["linear"], "is .'linear'.; supported is an object"),
    ],
)
def test_rope_settings_are_applied_whole_or_refused(key: str, values: Any, words: str) -> None:
    top = {"rope_theta": 5.0} if "rope_theta" in values else {}
    with pytest.raises(ConfigError, match=words):
        _read(**top, **{key: values})


def test_both_spellings_of_rope_must_agree() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert _read(rope_scaling=linear, rope_parameters=linear) == _read(rope_scaling=linear)
    with pytest.raises(ConfigError, match="only one of rope_parameters and rope_scaling"):
        _read(rope_scaling=linear, rope_parameters={"rope_type": "linear", "factor": 3.0})


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_families_that_rotate_whole_heads_refuse_a_part(model_type: str) -> None:
    for where in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
    ):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.5; supported is 1"):
            _read(model_type=model_type, num_key_value_heads=6, **where)


def test_scaling_stretches_the_context() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert _read(rope_scaling=linear).max_positions == 256
    assert _read(rope_scaling=yarn).max_positions == 256
    assert _read(rope_scaling=yarn, max_position_embeddings=300).max_positions == 300


@pytest.mark.parametrize("layer_types", [["full_attention"], ["full_attention", "chunked"], 3])
def test_layer_types_must_fit_the_layers(layer_types: Any) -> None:
    with pytest.raises(ConfigError, match="layer_types is"):
        _read(model_type="qwen2", num_key_value_heads=2, layer_types=layer_types)


@pytest.mark.parametrize("name", [*DECODERS, *DEEPSEEKS, *GEMMAS, *BERTS])
def test_written_configurations_read_back_the_same(name: str) -> None:
    model = (DECODERS | DEEPSEEKS | GEMMAS | BERTS)[name].build()
    config = read_config(json.loads(model.config.to_json_string()) | _architecture(model), name)
    assert read_config(write_config(config), name) == config


def _architecture(model: Any) -> dict[str, list[str]]:
    return {"architectures": [type(model).__name__]}


@pytest.mark.parametrize(
    ("attention", "layer", "words"),
    [
        ({"softcap": 50.0}, {}, r"softcap=50\.0"),
        ({"sinks": True}, {}, "sinks=True"),
        ({"window": 8, "window_ahead": 2}, {}, "window_ahead=2"),
        ({}, {"parallel": "two norms"}, "parallel='two norms'"),
        ({}, {"attention_norm": False}, "attention_norm=False"),
        ({}, {"feed_forward_out_norm": True}, "feed_forward_out_norm=True"),
        ({"v_head_dim": 4}, {}, "v_head_dim=4"),
    ],
)
def test_what_no_family_can_say_is_named(
    attention: dict[str, Any], layer: dict[str, Any], words: str
) -> None:
    parts = AttentionConfig(
        **{"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "rope": RopeConfig(), **attention}
    )
    config = TransformerConfig(
        kind="decoder",
        vocab_size=10,
        embed_dim=48,
        max_positions=64,
        layers=(LayerConfig(parts, FeedForwardConfig(88), **layer),),
    )
    with pytest.raises(ConfigError, match=f"cannot be written for Hugging Face.*{words}"):
        write_config(config)


def test_the_trained_length_may_stand_at_the_top_of_the_file() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    inside = _read(rope_scaling={**yarn, "original_max_position_embeddings": 32})
    at_top = _read(rope_scaling=yarn, original_max_position_embeddings=32)
    assert at_top == inside
    assert at_top != _read(rope_scaling=yarn)
