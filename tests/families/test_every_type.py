"""Every type of transformers' language models loads, or is refused by a reason: none is unknown."""

from __future__ import annotations

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from polyhead.errors import ConfigError
from polyhead.families import REFUSED, families, find_family, texts
from polyhead.families.common.wrappers import WRAPPERS

TYPES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
)
GONE = {"transfo-xl"}
"""Refused types that transformers had once."""


def test_no_type_is_unknown() -> None:
    known = {*families(), *texts(), *WRAPPERS, *REFUSED}
    assert [name for name in TYPES if name not in known] == []


def test_no_type_is_both_read_and_refused() -> None:
    assert not {*families(), *texts(), *WRAPPERS} & REFUSED.keys()


def test_refused_types_are_those_of_transformers() -> None:
    assert REFUSED.keys() - CONFIG_MAPPING_NAMES.keys() == GONE


def test_the_reason_is_one_clause_and_is_told() -> None:
    for name, reason in REFUSED.items():
        assert 20 < len(reason) <= 120, name
        assert "\n" not in reason, name
        assert not reason.endswith("."), name
        with pytest.raises(ConfigError) as error:
            find_family(name, "config.json")
        assert str(error.value).endswith(reason)
