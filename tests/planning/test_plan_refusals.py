"""Configurations and arguments that cannot be are refused by name; what is odd but legal is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_facts import GEMMA_3_27B, TINY, TINY_LATENT

import polyhead as ph
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.errors import ConfigError, ContextLengthError, ModelNotFoundError
from polyhead.planning import plan
from polyhead.planning.units import binary, decimal, quantity

BERT = {k: v for k, v in TINY.items() if k != "num_key_value_heads"} | {"model_type": "bert"}


def without(name: str, config: dict[str, Any] = TINY) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (without("hidden_size"), "key 'hidden_size' is missing"),
        (TINY | {"hidden_size": "32"}, "hidden_size must be a whole number: got '32'"),
        (TINY | {"num_key_value_heads": 3}, "num_kv_heads must divide num_heads: got num_heads=4"),
        (
            TINY | {"num_attention_heads": 1 << 53, "head_dim": 8},
            "num_heads must be at most 1,048,576",
        ),
        (TINY | {"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        (TINY | {"novel_key": 3}, "key 'novel_key' .* is not understood"),
        (TINY_LATENT | {"num_experts_per_tok": 9}, "experts_per_token must be 1 to the 8 experts"),
        (TINY | {"model_type": "novel"}, "model_type is 'novel'; supported are llama"),
        (TINY | {"model_type": "rwkv"}, "not supported: its layers are linear recurrences"),
        (GEMMA_3_27B | {"text_config": {"model_type": "gemma3_text"}}, "hidden_size.* is missing"),
    ],
)
def test_impossible_configurations_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"config: .*{words}"):
        plan(config, tokens=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": 0}, "tokens must be a whole number of at least 1: got 0"),
        ({"tokens": 8.0}, "tokens must be a whole number"),
        ({"batch_size": -1}, "batch_size must be"),
        ({"page_size": 0}, "page_size must be a whole number of at least 1: got 0"),
        ({"page_size": 33, "kv_dtype": "int8"}, "page_size must be a multiple of group=32: got 33"),
        ({"tensor_parallel": 0}, "tensor_parallel must be"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide num_heads=4: got 3"),
        ({"dtype": "fp4"}, "dtype must be one of float32, .*: got 'fp4'"),
        ({"kv_dtype": "float8"}, "kv_dtype must be one of .*: got 'float8'"),
        ({"memory": "lots"}, "memory must be a number of B.*: got 'lots'"),
        ({"memory": "24GiB/s"}, "memory must be a number of B"),
        ({"memory": 0}, "memory must be positive"),
        ({"bandwidth": "1TFLOP/s"}, "bandwidth must be a number of B/s"),
        ({"flops": "1TB/s"}, "flops must be a number of FLOP/s"),
        ({"flops": float("nan")}, "flops must be positive"),
        ({"memory": 1000}, r"memory must hold the weights of a rank, \d[\d,]* bytes: got 1,000"),
    ],
)
def test_impossible_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(TINY, **{"tokens": 8, **arguments})


def test_ranks_that_cannot_share_are_named() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel must divide num_kv_heads=3 or be a mult"
    ):
        plan(
            TINY | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            tokens=8,
            tensor_parallel=2,
        )
    with pytest.raises(ConfigError, match="feed-forward hidden_dim=50: got 4"):
        plan(TINY | {"intermediate_size": 50}, tokens=8, tensor_parallel=4)


def test_a_context_past_the_model_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ContextLengthError, match=r"tokens .* max_position_embeddings=256.*got 257"):
        plan(BERT, tokens=257)
    with pytest.raises(ContextLengthError, match="max_position_embeddings=1,024"):
        plan("gpt2", tokens=1025)
    assert plan(TINY, tokens=256).tokens == 256
    with pytest.raises(ContextLengthError, match=r"max_position_embeddings=256.*got 257"):
        plan(TINY, tokens=257)


def test_unknown_names_and_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no configuration 'llama-9'.*llama-3-8b"):
        plan("llama-9", tokens=8)
    with pytest.raises(ModelNotFoundError, match="neither a path nor a preset"):
        plan(tmp_path, tokens=8)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is not a config\.json"):
        plan(other, tokens=8)
    with pytest.raises(TypeError, match=r"config must be a preset's name.*got int"):
        plan(7, tokens=8)


def test_heads_wider_or_narrower_than_the_width_are_legal_where_head_dim_is_given() -> None:
    for head_dim in (4, 16):
        first = plan(TINY | {"head_dim": head_dim}, tokens=8).config.layers[0].attention
        assert isinstance(first, AttentionConfig)
        assert first.head_dim == head_dim


def test_kv_heads_of_every_layer_may_differ() -> None:
    layers = tuple(LayerConfig(AttentionConfig(4, G, 8), FeedForwardConfig(48)) for G in (4, 1, 2))
    made = plan(TransformerConfig("decoder", 100, 32, 256, layers), tokens=64)
    assert [row.attention for row in made.cache_layers] == ["MHA", "MQA", "GQA-2"]
    assert made.cache_bytes == 64 * 2 * 8 * 2 * (4 + 1 + 2)


def test_the_text_model_of_several_is_counted_and_said() -> None:
    made = plan(GEMMA_3_27B, tokens=8)
    assert made.notes == ("only the text model (text_config) is counted",)
    other = plan(GEMMA_3_27B | {"vocab_size": 1000, "tie_word_embeddings": False}, tokens=64)
    assert other.parameters.embedding == other.parameters.head == 1000 * 5376
    assert made.config.embed_dim == 5376
    assert made.config.vocab_size == 262_208


def test_files_directories_and_objects_mean_the_same(tmp_path: Path) -> None:
    import transformers

    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    plans = [
        plan(given, tokens=64)
        for given in (TINY, file, str(file), tmp_path, transformers.LlamaConfig(**TINY))
    ]
    assert len({made.parameters for made in plans}) == 1
    assert len({made.cache_bytes for made in plans}) == 1
    assert len({made.prefill for made in plans}) == 1
    names = ["llama", tmp_path.name, tmp_path.name, tmp_path.name, "llama"]
    assert [made.name for made in plans] == names
    assert plan(TINY | {"_name_or_path": "somebody/tiny"}, tokens=64).name == "somebody/tiny"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("24GiB", "B", 24 * 2**30),
        ("24 gb", "B", 24e9),
        ("80G", "B", 80e9),
        ("1,024", "B", 1024),
        ("1_024.5", "B", 1024.5),
        ("3.35TB/s", "B/s", 3.35e12),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("989TFLOPS", "FLOP/s", 989e12),
        (5, "B", 5),
        *((f"2{prefix}B", "B", 2 * 1000**n) for n, prefix in enumerate(["", *"kMGTP"])),
        *((f"3 {prefix}iB", "B", 3 * 1024 ** (n + 1)) for n, prefix in enumerate("KMGTP")),
    ],
)
def test_quantities_as_people_write_them(text: Any, unit: str, value: float) -> None:
    assert quantity("memory", text, unit=unit) == value


def test_quantities_as_they_are_shown() -> None:
    assert binary(10.41 * 2**30) == "10.41 GiB"
    assert binary(999) == "999 B"
    assert binary(3 * 2**40) == "3.00 TiB"
    assert decimal(8_030_261_248) == "8.03 G"
    assert decimal(12, "FLOP") == "12 FLOP"
    assert decimal(5e18, "FLOP") == "5,000 PFLOP"


def test_a_name_that_is_spelt_alike_is_asked_for() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'lama-3-8b' \(did you mean 'llama-3-8b'\?\)"):
        ph.plan("lama-3-8b")
    with pytest.raises(ModelNotFoundError, match=r"'smollm' \(did you mean 'smollm2'\?\)"):
        ph.load("smollm")


def test_a_plan_has_the_model_s_own_context_and_a_short_repr() -> None:
    plan = ph.plan("llama-3-8b")
    assert plan.tokens == 8192
    assert repr(plan) == (
        "Plan('LLaMA-3-8B', tokens=8192, batch_size=1, dtype='bfloat16', parameters=8030261248, "
        "cache_bytes=1073741824)"
    )
