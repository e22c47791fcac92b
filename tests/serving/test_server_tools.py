"""Functions that models call: told to the template, read from the text, forced by a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_tiny import asking, events_of, models_of, tiny_decoder
from starlette.testclient import TestClient

from polyhead.errors import InputError
from polyhead.serving.http.errors import ApiError
from polyhead.serving.http.prompts import message_of
from polyhead.serving.http.tools import Call, CallReader, Tools, tools_of

CHAT = "/v1/chat/completions"
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
LLAMA = 'Use {"name": function name, "parameters": …}.' + HERMES.replace("<tool_call>", "")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
MESSAGES = [{"role": "user", "content": "a"}]


def tools(template: str = HERMES, **options: Any) -> Tools | None:
    return tools_of({"tools": [WEATHER, TIME], **options}, template)


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The words, and the calls with their arguments."""
    found = [each for piece in pieces for each in reader.feed(piece)] + [*reader.flush()]
    words = "".join(each for each in found if isinstance(each, str))
    calls = [(each.name, json.loads(each.arguments)) for each in found if isinstance(each, Call)]
    return words, calls


ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
TEXTS = [
    ("no call at all < >", "no call at all < >", []),
    (f"<tool_call>\n{ROME}\n</tool_call>", "", [("weather", {"city": "Rome"})]),
    (
        f'I look.\n<tool_call>{ROME}</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>',
        "I look.\n",
        [("weather", {"city": "Rome"}), ("time", {})],
    ),
    (f"unclosed <tool_call>{ROME}", "unclosed ", [("weather", {"city": "Rome"})]),
    ("<tool_call>no json</tool_call> b", "<tool_call>no json</tool_call> b", []),
    (
        '<tool_call>{"name": "unknown"}</tool_call>',
        '<tool_call>{"name": "unknown"}</tool_call>',
        [],
    ),
    ("a <tool_ca b", "a <tool_ca b", []),
    (f"<tool_call>{ROME}</tool_call> and on", " and on", [("weather", {"city": "Rome"})]),
]


@pytest.mark.parametrize(("text", "words", "calls"), TEXTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_calls_are_read_however_the_text_is_cut(
    text: str, words: str, calls: list[Any], data: st.DataObject
) -> None:
    found = tools()
    assert found is not None
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    assert read(CallReader(found), pieces) == (words, calls)


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ('{"name": "time", "parameters": {}}', "", [("time", {})]),
        (
            ' \n{"name": "weather", "parameters": {"city": "Oslo"}}',
            "",
            [("weather", {"city": "Oslo"})],
        ),
        ('{"answer": 1}', '{"answer": 1}', []),
        ('It is {"name": "time"}', 'It is {"name": "time"}', []),
        ("", "", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_that_is_an_object_is_a_call(
    size: int, text: str, words: str, calls: list[Any]
) -> None:
    found = tools(LLAMA)
    assert found is not None
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(CallReader(found), pieces) == (words, calls)


@pytest.mark.parametrize(
    ("options", "template", "words"),
    [
        ({}, None, "knows none"),
        ({}, "{{ messages }}", "knows none"),
        ({}, "{{ tools }}", "the form of its calls is not known"),
        ({}, "{{ tools }}<tool_call><function=", "the form of its calls is not known"),
        ({"tool_choice": "any"}, HERMES, "none, auto, required or a function"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, HERMES, "one of the"),
        ({"tools": [TIME] * 129}, HERMES, "at most 128"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, HERMES, "got 'a b'"),
    ],
)
def test_tools_that_cannot_be_are_refused(
    options: dict[str, Any], template: str | None, words: str
) -> None:
    with pytest.raises(ApiError, match=words):
        tools_of({"tools": [TIME], **options}, template)


def test_no_tools_are_told_where_none_may_be_called() -> None:
    assert tools(tool_choice="none") is None
    assert tools_of({}, HERMES) is None


def test_messages_of_calls_are_read_as_templates_take_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    made = message_of(0, {"role": "assistant", "tool_calls": [call], "content": None})
    assert made["content"] == ""
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    answer = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}] * 2}
    assert message_of(1, answer) == {"role": "tool", "content": "xx", "tool_call_id": "1"}
    assert message_of(2, {"role": "developer", "content": "a"})["role"] == "system"


@pytest.fixture(scope="module", params=[HERMES, LLAMA])
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    pytest.importorskip("llguidance")
    model = tiny_decoder()
    model.tokenizer.chat_template = request.param
    with asking(models_of(model)) as found:
        yield found


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_is_a_call(client: TestClient, choice: Any) -> None:
    weather = {"type": "function", "function": {**WEATHER["function"], "description": "x"}}
    body = {"messages": MESSAGES, "tools": [weather], "tool_choice": choice, "max_tokens": 90}
    body |= {"model": "tiny", "seed": 1, "temperature": 1.5}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    streamed = [
        e["choices"][0] for e in events_of(client.post(CHAT, json=body | {"stream": True}).text)
    ]
    (told,) = [each["delta"]["tool_calls"][0] for each in streamed if "tool_calls" in each["delta"]]
    assert told["function"] == call["function"]
    assert told["index"] == 0
    assert streamed[-1]["finish_reason"] == "tool_calls"
    assert not "".join(each["delta"].get("content") or "" for each in streamed).strip()


def test_patterns_of_a_forced_call_are_bounded() -> None:
    parameters = {"properties": {"a": {"type": "string", "pattern": "a*" * 5_000}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InputError, match="10,000 characters, at most 8,192"):
        _ = Tools([tool], True, ["f"]).grammar
