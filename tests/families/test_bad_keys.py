"""A key that is misspelt, of the wrong type or impossible is an error that names file and key."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from harness import all_cases

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


def _tiny(model_type: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(all_cases()[model_type].config().to_json_string())
    harmless = HARMLESS | families()[model_type].harmless
    return {key: value for key, value in values.items() if key not in harmless}


@pytest.mark.parametrize("model_type", all_cases())
def test_bad_keys_are_named(model_type: str) -> None:
    values = _tiny(model_type)
    read_config(values, "config.json")
    chance = random.Random(model_type)
    keys = sorted(set(values) - _FREE)
    for key in chance.sample(keys, min(_EACH, len(keys))):
        misspelt = key + "s"
        wrong = {name: value for name, value in values.items() if name != key}
        with pytest.raises(ConfigError, match=rf"config\.json.*\b({misspelt}|{key})\b"):
            read_config(wrong | {misspelt: values[key]}, "config.json")
        bad = chance.choice(_BAD)
        if _is_taken_as_it_is(values, key, bad):
            continue
        with pytest.raises(ConfigError, match=rf"config\.json.*\b{key}\b"):
            read_config(values | {key: bad}, "config.json")


def _is_taken_as_it_is(values: dict[str, Any], key: str, bad: Any) -> bool:
    """Whether the value is a legal one after all: an id below 0 means none in old files."""
    return key.endswith("token_id") and isinstance(bad, int)
