"""Texts of a given form: a mask that is a function of the tokens so far."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, byte_tokenizer

pytest.importorskip("llguidance")

from polyhead.errors import InputError
from polyhead.generation.decoding.rules import NEVER, Rows
from polyhead.serving.grammars import Grammars

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "é"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, VOCABULARY, TOKENIZER.stop_ids)
TEXTS = [json.dumps({"a": value}, ensure_ascii=False) for value in (1, "é")]
PROMPT = [5, 6, 7]


def allowed(rule: object, text: list[int]) -> set[int]:
    rows = Rows([PROMPT + text], len(text), [len(PROMPT)])
    scores = rule(rows, torch.zeros(1, VOCABULARY))  # type: ignore[operator]
    return set((scores[0] != NEVER).nonzero()[:, 0].tolist())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 12)), min_size=1, max_size=8))
def test_the_mask_follows_from_the_tokens_whatever_was_asked_before(
    asked: list[tuple[int, int]],
) -> None:
    rule = GRAMMARS.of_schema(SCHEMA)
    for number, length in asked:
        ids = TOKENIZER.encode(TEXTS[number])[:length]
        ways = [TOKENIZER.encode(text) for text in TEXTS]
        ways = [way for way in ways if way[: len(ids)] == ids]
        wanted = {way[len(ids)] for way in ways if len(way) > len(ids)}
        if any(way == ids for way in ways):
            wanted |= TOKENIZER.stop_ids
        assert allowed(rule, ids) == wanted


def test_a_copy_begins_anew() -> None:
    rule = GRAMMARS.of_schema(SCHEMA)
    ids = TOKENIZER.encode(TEXTS[0])
    assert allowed(rule, ids[:3]) == {ids[3]}
    assert allowed(rule.copy(), []) == {ids[0]}
    assert allowed(rule, ids[:4]) == {ids[4]}


def chain(length: int) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    named = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**named, f"a{length}": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        chain(40),
        {"type": "number", "multipleOf": 0.01},
        {"properties": {f"name{n}": {"type": "string"} for n in range(300)}},
        {"anyOf": [{"type": "string", "pattern": "^(a|aa)+$"}, {"items": {"$ref": "#"}}]},
    ],
)
def test_large_grammars_that_cost_little_are_compiled(schema: dict[str, Any]) -> None:
    assert allowed(GRAMMARS.of_schema(schema), [])


def test_grammars_that_cannot_be_are_refused() -> None:
    for schema, words in (
        ({"type": "nothing"}, "Invalid type: nothing"),
        ({"$ref": "#/x"}, "the JSON schema cannot be used"),
        ({"enum": ["x" * 300_000]}, "300,014 characters, at most 131,072"),
        ({"$ref": "#"}, "NoExtension"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "NoExtension"),
        ({"type": "string", "pattern": "a*" * 20_000}, "40,000 characters, at most 8,192"),
        ({"patternProperties": {"a*" * 5_000: {}}}, "10,000 characters, at most 8,192"),
        ({"type": "string", "pattern": "a*" * 1_000}, "too many expressions"),
        ({"type": "string", "pattern": "(" * 4_000 + ")" * 4_000}, "regex parse error"),
        ({"type": "integer", "multipleOf": 499_979}, "too complex"),  # minutes, where ten are asked
        (chain(3_000), "too complex"),  # deeper than a stack
    ):
        with pytest.raises(InputError, match=words):
            GRAMMARS.of_schema(schema)
    with pytest.raises(InputError, match="the grammar cannot be used"):
        GRAMMARS.of_lark("start: (")
    with pytest.raises(InputError, match="without a stop token"):
        Grammars(TOKENIZER, VOCABULARY, frozenset()).of_schema(SCHEMA)


def test_a_text_outside_of_the_grammar_is_an_error() -> None:
    rule = GRAMMARS.of_schema(SCHEMA)
    with pytest.raises(InputError, match="the grammar cannot go on"):
        allowed(rule, TOKENIZER.encode("no"))
