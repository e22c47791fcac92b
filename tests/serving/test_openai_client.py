"""The API as OpenAI's own client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served_tiny import listening, models_of, tiny_encoder

import polyhead as ph

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "user", "content": "Say something"}]


@pytest.fixture(scope="module")
def client(model: ph.LanguageModel) -> Iterator[Any]:
    with (
        listening(models_of(model), keys=["a-key-of-mine"]) as port,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="a-key-of-mine", max_retries=0
        ) as found,
    ):
        yield found


def test_a_chat_and_its_stream(client: Any, model: ph.LanguageModel) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 9}
    made = client.chat.completions.create(**body)
    text = model.generate(MESSAGES, max_new_tokens=9).text
    assert made.choices[0].message.content == text
    assert made.usage.completion_tokens == 9
    stream = client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    *events, last = stream
    assert "".join(event.choices[0].delta.content or "" for event in events) == text
    assert last.usage.total_tokens == made.usage.total_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0  # what the first request had read


def test_completions_with_options_of_ours(client: Any, model: ph.LanguageModel) -> None:
    made = client.completions.create(
        model="tiny", prompt="One", seed=3, max_tokens=8, n=2, logprobs=1, extra_body={"top_k": 5}
    )
    alone = [
        model.generate("One", seed=seed, temperature=1.0, top_k=5, max_new_tokens=8).text
        for seed in (3, 4)
    ]
    assert [choice.text for choice in made.choices] == alone
    assert len(made.choices[0].logprobs.tokens) == 8


def test_embeddings_and_models(client: Any) -> None:
    made = client.embeddings.create(model="vectors", input=["a", "b"])  # asks for base64
    alone = tiny_encoder().encode(["a", "b"])
    for each, vector in zip(made.data, alone, strict=True):
        assert each.embedding == pytest.approx(vector.tolist(), abs=1e-6)
    assert [each.id for each in client.models.list()] == ["tiny", "vectors"]


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, store=True)
    assert (bad.value.param, bad.value.code) == ("store", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()


def test_answers_of_a_schema_become_objects(client: Any) -> None:
    pytest.importorskip("llguidance")
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        age: int = Field(ge=10, le=99)
        alive: bool

    made = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, seed=2, max_tokens=60
    )
    assert isinstance(made.choices[0].message.parsed, Person)
