"""Configurations and arguments that cannot be are refused by name; what is odd but legal is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_facts import GEMMA_3_27B, TINY, TINY_LATENT

from polyhead.errors import ConfigError, ContextLengthError, ModelNotFoundError
from polyhead.layers import AttentionConfig
from polyhead.planning import plan
from polyhead.planning.units import binary, decimal, quantity

BERT = {k: v for k, v in TINY.items() if k != "num_key_value_heads"} | {"model_type": "bert"}


def without(name: str, config: dict[str, Any] = TINY) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (without("hidden_size"), "'hidden_size' or 'n_embd' .* is missing"),
        (without("num_hidden_layers"), "num_hidden_layers.* is missing"),
        (without("num_attention_heads"), "num_attention_heads.* is missing"),
        (without("vocab_size"), "vocab_size.* is missing"),
        (without("intermediate_size"), "intermediate_size.* is missing"),
        (without("qk_nope_head_dim", TINY_LATENT), "qk_nope_head_dim.* is missing"),
        (without("v_head_dim", TINY_LATENT), "v_head_dim.* is missing"),
        (without("num_experts_per_tok", TINY_LATENT), "num_experts_per_tok.* is missing"),
        (TINY | {"hidden_size": "32"}, "hidden_size must be a whole number .*: got '32'"),
        (TINY | {"hidden_size": 0}, "hidden_size must be a whole number of at least 1: got 0"),
        (TINY | {"vocab_size": 1.5}, "vocab_size must be a whole number"),
        (TINY | {"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        (
            TINY | {"num_attention_heads": 3, "num_key_value_heads": 3},
            "num_attention_heads=3 must divide hidden_size=32, or head_dim",
        ),
        (
            TINY | {"num_key_value_heads": 3},
            "num_key_value_heads=3 must divide num_attention_heads=4",
        ),
        (TINY | {"num_key_value_heads": [2, 2]}, "num_key_value_heads must be .*=3 layers: got 2"),
        (TINY | {"layer_types": ["full_attention"]}, "layer_types must be a list of .*=3"),
        (TINY | {"layer_types": ["full_attention", "mamba", "mamba"]}, "layer_types .* 'mamba'"),
        (
            TINY | {"layer_types": ["sliding_attention"] * 3},
            "'sliding_attention' but sliding_window is missing",
        ),
        (TINY | {"rope_scaling": {"rope_type": "spiral"}}, "rope type must be .*: got 'spiral'"),
        (TINY | {"rope_scaling": {"type": "spiral"}}, "rope type must be .*: got 'spiral'"),
        (
            TINY | {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}},
            "rope type must be .*: got 'spiral'",
        ),
        (TINY | {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        (TINY | {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        (TINY_LATENT | {"num_experts_per_tok": 9}, "num_experts_per_tok=9 .* experts, 8"),
        (TINY_LATENT | {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even"),
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
        ({"batch": -1}, "batch must be"),
        ({"page": 0}, "page must be a whole number of at least 1: got 0"),
        ({"page": 33, "kv_dtype": "int8"}, "page_size must be a multiple of group=32: got 33"),
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
    with pytest.raises(ConfigError, match=r"is no config\.json"):
        plan(other, tokens=8)
    with pytest.raises(TypeError, match=r"config must be a preset's name.*got int"):
        plan(7, tokens=8)


def test_heads_wider_or_narrower_than_the_width_are_legal_where_head_dim_is_given() -> None:
    for head_dim in (4, 16):
        first = plan(TINY | {"head_dim": head_dim}, tokens=8).architecture.layers[0].attention
        assert isinstance(first, AttentionConfig)
        assert first.head_dim == head_dim


def test_kv_heads_of_every_layer_may_differ() -> None:
    made = plan(TINY | {"num_key_value_heads": [4, 1, 2]}, tokens=64)
    assert [row.attention for row in made.cache_layers] == ["MHA", "MQA", "GQA-2"]
    assert made.cache_bytes == 64 * 2 * 8 * 2 * (4 + 1 + 2)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, [9, 9, 9]),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 3),
        ({"model_type": "llama", "sliding_window": 9}, [None] * 3),
        ({"model_type": "gemma2", "sliding_window": 9}, [9, None, 9]),
        (
            {"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3},
            [9, 9, None],
        ),
        ({"model_type": "qwen2", "sliding_window": 9}, [None] * 3),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            [None, 9, 9],
        ),
        (
            {
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            [None, 9, None],
        ),
    ],
)
def test_windows_of_every_layer(changes: dict[str, Any], windows: list[int | None]) -> None:
    layers = plan(TINY | changes, tokens=8).architecture.layers
    assert [getattr(layer.attention, "window", None) for layer in layers] == windows


def test_dense_layers_of_a_mixture() -> None:
    def experts(**changes: Any) -> list[int]:
        config = TINY_LATENT | {"num_hidden_layers": 6} | changes
        return [layer.feed_forward.experts for layer in plan(config, tokens=8).architecture.layers]

    assert experts() == [1, 8, 8, 8, 8, 8]
    assert experts(first_k_dense_replace=3) == [1, 1, 1, 8, 8, 8]
    assert experts(first_k_dense_replace=0, moe_layer_freq=2) == [8, 1, 8, 1, 8, 1]
    assert experts(moe_layer_freq=[0, 0, 1, 1, 1, 0], first_k_dense_replace=0) == [1, 1, 8, 8, 8, 1]
    assert experts(decoder_sparse_step=2, first_k_dense_replace=0) == [1, 8, 1, 8, 1, 8]
    assert experts(mlp_only_layers=[4]) == [1, 8, 8, 8, 1, 8]


def test_the_text_model_of_several_is_counted_and_said() -> None:
    made = plan(GEMMA_3_27B, tokens=8)
    assert made.notes == ("only the text model (text_config) is counted",)
    assert made.architecture.embed_dim == 5376
    assert made.architecture.vocab_size == 262_208


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
    assert plans[1].architecture.name == tmp_path.name


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("24GiB", "B", 24 * 2**30),
        ("24 gb", "B", 24e9),
        ("80G", "B", 80e9),
        ("1,024", "B", 1024),
        ("3.35TB/s", "B/s", 3.35e12),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("989TFLOPS", "FLOP/s", 989e12),
        (5, "B", 5),
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
