"""A key that is misspelt, of the wrong type or impossible is an error that names file and key."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import all_cases

from fuzz.targets.families import ODD
from fuzz.verdict import flaw
from polyhead.errors import ConfigError
from polyhead.families import families, read_config
from polyhead.families.common.config_json import HARMLESS

_FREE = {
    "model_type",
    "architectures",
    "is_encoder_decoder",
    "quantization_config",
    # Absent is as good as null.
    "rope_scaling",
}
_BAD: tuple[Any, ...] = ("many", {"of": 1}, [[]], -(10**30))
_EACH = 4


@cache
def _tiny(model_type: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(all_cases()[model_type].config().to_json_string())
    values["model_type"] = model_type
    harmless = HARMLESS | families()[model_type].harmless
    return {key: value for key, value in values.items() if key not in harmless}


@cache
def _changes(model_type: str) -> list[tuple[str, dict[str, Any]]]:
    """Configurations with one key misspelt, of the wrong type or contradictory, and how the message
    has to name it.
    """
    values = _tiny(model_type)
    chance = random.Random(model_type)
    keys = sorted(set(values) - _FREE)
    found: list[tuple[str, dict[str, Any]]] = []
    for key in chance.sample(keys, min(_EACH, len(keys))):
        wrong = {name: value for name, value in values.items() if name != key}
        found.append((f"{key}s|{key}", wrong | {key + "s": values[key]}))
        bad = chance.choice(_BAD)
        if not _is_taken_as_it_is(key, bad):
            found.append((key, values | {key: bad}))
    for shared, own in families()[model_type].aliases.items():
        if isinstance(values.get(own), int) and values[own] is not True:
            found.append((f"{own}.* and {shared}", values | {shared: values[own] + 1}))
            break
    rotary = values.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        found.append(("rope_theta", values | {"rope_theta": rotary["rope_theta"] + 1}))
    if isinstance(values.get("layer_types"), list):
        found.append(("layer_types", values | {"layer_types": values["layer_types"][1:]}))
    return found


@pytest.mark.parametrize("model_type", all_cases())
def test_bad_keys_are_named(model_type: str) -> None:
    read_config(_tiny(model_type), "config.json")
    for name, values in _changes(model_type):
        with pytest.raises(ConfigError, match=rf"config\.json.*\b({name})\b"):
            read_config(values, "config.json")


@pytest.mark.parametrize(
    ("model_type", "key", "bad"),
    [
        ("llama", "hidden_size", 0),
        ("llama", "num_attention_heads", -1),
        ("llama", "head_dim", 0),
        ("gptj", "n_head", 0),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "query_pre_attn_scalar", -1.0),
        ("granite", "logits_scaling", 0),
        ("granitemoe", "logits_scaling", -2.0),
    ],
)
def test_sizes_and_scales_are_above_zero(model_type: str, key: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is {bad}.*a (whole )?number"):
        read_config(_tiny(model_type) | {key: bad}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "key", "bad"),
    [
        ("llama4_text", "layer_types", -1),
        ("llama4_text", "layer_types", [[], [], []]),
        ("llama4_text", "no_rope_layers", ["1", "0", "1"]),
        ("smollm3", "no_rope_layers", ["1", "0", "1"]),
    ],
)
def test_lists_of_layers_hold_what_the_family_knows(model_type: str, key: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is .*; supported is 3 of "):
        read_config(_tiny(model_type) | {key: bad}, "config.json")


def _refusal(values: dict[str, Any]) -> str:
    try:
        read_config(values, "config.json")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", all_cases())
def test_an_absent_key_is_of_its_type(model_type: str) -> None:
    """A default may not go with the sizes of a tiny model, but it is no wrong value by itself."""
    family, values = families()[model_type], _tiny(model_type)
    for key in sorted(family.defaults.keys() & values.keys() - {"pad_token_id"}):
        without = {name: value for name, value in values.items() if name != key}
        assert f"{key} must be a " not in _refusal(without)


def test_a_trained_length_of_zero_is_refused_by_name() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 0}
    with pytest.raises(ConfigError, match="original_max_position_embeddings is 0; supported is"):
        read_config(_tiny("llama") | {"rope_parameters": rope}, "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", all_cases())
def test_any_odd_value_under_any_key_is_read_or_refused_in_a_sentence(model_type: str) -> None:
    values = _tiny(model_type)
    for key in sorted(set(values) - {"model_type"}):
        for odd in ODD:
            error = None
            try:
                read_config(values | {key: odd}, "config.json")
            except Exception as found:
                error = found
            assert error is None or flaw(error) is None, (key, odd, error)


def test_there_are_many_more_than_two_hundred() -> None:
    assert sum(len(_changes(model_type)) for model_type in all_cases()) > 700


def _is_taken_as_it_is(key: str, bad: Any) -> bool:
    """Whether the value is a legal one after all: an id below 0 means none in old files."""
    return key.endswith("token_id") and isinstance(bad, int)


def test_times_of_a_list_of_layers_are_limited_by_the_layers(tmp_path):
    wrong = _tiny("gpt_neo") | {
        "attention_types": [[["global", "local"], 10**9]],
        "attention_layers": None,
    }
    with pytest.raises(ConfigError, match=r"attention_types is .*; supported is 2 of"):
        read_config(wrong, tmp_path / "config.json")


def test_a_model_of_many_languages_is_built_for_one(tmp_path: Path) -> None:
    values = _tiny("xmod") | {"default_language": None}
    with pytest.raises(ConfigError, match="default_language is None; supported is one of langu"):
        read_config(values, tmp_path / "config.json")
    only = read_config(values | {"languages": ["de_DE"]}, tmp_path / "config.json")
    assert only.layers[0].adapter is not None
    assert only.layers[0].adapter.name == "de_DE"


def test_attention_of_qwen3_5_without_a_gate_is_refused() -> None:
    values = _tiny("qwen3_5_text")
    with pytest.raises(ConfigError, match="attn_output_gate is False; supported is True"):
        read_config(values | {"attn_output_gate": False}, "config.json")


def test_scaling_of_step_that_is_no_object_is_refused() -> None:
    values = {key: value for key, value in _tiny("step3p5").items() if key != "rope_parameters"}
    with pytest.raises(ConfigError, match="rope_scaling is -1; supported is an object or null"):
        read_config(values | {"rope_scaling": -1}, "config.json")
