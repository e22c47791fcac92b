"""Chats and completions over the API have the tokens that the model alone gives."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from served_tiny import CONTEXT, asking, events_of, models_of
from starlette.testclient import TestClient
from tiny import lora

import polyhead as ph
from polyhead.errors import InputError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say something, 猫"}]


def ask(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_is_the_model_alone(client: TestClient, model: ph.LanguageModel) -> None:
    made = ask(client, CHAT, model="tiny", messages=MESSAGES, temperature=0, max_tokens=12)
    alone = model.generate(MESSAGES, max_new_tokens=12)
    (choice,) = made["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert made["object"] == "chat.completion"
    read = alone.stats.prompt_tokens
    assert made["usage"]["prompt_tokens"] == read
    assert made["usage"]["completion_tokens"] == 12
    assert made["usage"]["total_tokens"] == read + 12


def test_texts_of_a_seed_are_those_of_the_model_alone(
    client: TestClient, model: ph.LanguageModel
) -> None:
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    body = {"prompt": ["One", "and two"], "seed": 7, "n": 2, "max_tokens": 9, **drawn}
    made = ask(client, COMPLETIONS, model="tiny", **body)
    alone = [
        model.generate(prompt, seed=seed, max_new_tokens=9, **drawn).text
        for prompt in ("One", "and two")
        for seed in (7, 8)
    ]
    assert [choice["text"] for choice in made["choices"]] == alone
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert made["usage"]["prompt_tokens"] == len("One") + len("and two")


def test_a_prompt_of_token_ids_is_the_text_that_they_stand_for(
    client: TestClient, model: ph.LanguageModel
) -> None:
    ids = model.tokenizer.encode("Once upon")
    made = [
        ask(client, COMPLETIONS, model="tiny", prompt=prompt, temperature=0)
        for prompt in ("Once upon", ids, [ids])
    ]
    assert [each["choices"] for each in made] == [made[0]["choices"]] * 3
    assert made[0]["usage"]["completion_tokens"] == 16  # OpenAI's default of completions


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer_in_pieces(client: TestClient, n: int) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 10, "n": n}
    whole = ask(client, CHAT, **body)
    answer = client.post(
        CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, usage = events_of(answer.text)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        text = "".join(each["delta"].get("content", "") for each in mine)
        assert text == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert len(events) > 2 * n + 3


def test_a_stop_text_ends_a_text_and_is_not_sent(
    client: TestClient, model: ph.LanguageModel
) -> None:
    text = model.generate("Once", max_new_tokens=30).text
    stop = text[5:7]
    for stream in (False, True):
        body = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 30, "stop": stop}
        answer = client.post(COMPLETIONS, json={**body, "stream": stream})
        if stream:
            choices = [event["choices"][0] for event in events_of(answer.text)]
            made, reason = "".join(c["text"] for c in choices), choices[-1]["finish_reason"]
        else:
            (choice,) = answer.json()["choices"]
            made, reason = choice["text"], choice["finish_reason"]
        assert (made, reason) == (text[: text.index(stop)], "stop")


def test_logprobs_are_those_of_the_logits(client: TestClient, model: ph.LanguageModel) -> None:
    made = ask(
        client, CHAT, model="tiny", messages=MESSAGES, temperature=0, max_tokens=5,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    ids = model.prompt_ids(MESSAGES)
    told = made["choices"][0]["logprobs"]["content"]
    assert len(told) == 5
    for each in told:
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0, -1]
        best = logits.log_softmax(-1).topk(3)
        assert each["bytes"] == list(model.tokenizer.token_bytes(int(best.indices[0])))
        assert each["logprob"] == pytest.approx(float(best.values[0]), abs=1e-4)
        likeliest = [entry["logprob"] for entry in each["top_logprobs"]]
        assert likeliest == pytest.approx(best.values.tolist(), abs=1e-4)
        ids.append(int(best.indices[0]))


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(client: TestClient) -> None:
    body = {"model": "tiny", "prompt": "Once", "seed": 1, "max_tokens": 8, "logprobs": 2}
    whole = ask(client, COMPLETIONS, **body)["choices"][0]["logprobs"]
    answer = client.post(COMPLETIONS, json={**body, "stream": True})
    told = [event["choices"][0]["logprobs"] for event in events_of(answer.text)]
    for key, values in whole.items():
        assert [each for some in told if some for each in some[key]] == values
    assert len(whole["tokens"]) == 8


def test_penalties_and_biases_change_logits_as_openai_says(
    client: TestClient, model: ph.LanguageModel
) -> None:
    ids, written = model.tokenizer.encode("Once"), []
    for _ in range(12):
        with torch.no_grad():
            logits = model(torch.tensor([ids + written]))[0, -1].double()
        for token in set(written):
            logits[token] -= 1.5 * written.count(token) + 0.5
        logits[65] += 2.0
        written.append(int(logits.argmax()))
    made = ask(
        client, COMPLETIONS, model="tiny", prompt="Once", temperature=0, max_tokens=12,
        frequency_penalty=1.5, presence_penalty=0.5, logit_bias={"65": 2.0},
    )  # fmt: skip
    assert made["choices"][0]["text"] == model.tokenizer.decode(written)
    assert len(set(written)) < 12  # a token came twice


def test_a_chat_without_a_limit_fills_what_is_left_of_the_context(
    client: TestClient, model: ph.LanguageModel
) -> None:
    made = ask(client, CHAT, model="tiny", messages=MESSAGES, temperature=0)
    assert made["usage"]["total_tokens"] == CONTEXT


def test_vectors_are_those_of_the_encoder(client: TestClient) -> None:
    import base64

    import numpy as np
    from served_tiny import tiny_encoder

    texts = ["a text", "注意力"]
    alone = tiny_encoder().encode(texts)
    made = ask(client, "/v1/embeddings", model="vectors", input=texts)
    assert [each["embedding"] for each in made["data"]] == alone.tolist()
    assert made["usage"]["prompt_tokens"] == 15
    packed = ask(client, "/v1/embeddings", input=texts[0], encoding_format="base64")
    values = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
    assert np.allclose(values, alone[0].numpy(), atol=1e-6)


def test_models_health_and_figures(client: TestClient) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "vectors"]
    assert client.get("/v1/models/tiny").json()["owned_by"] == "polyhead"
    assert client.get("/v1/models/gpt-4o").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}

    def figure(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])

    before = figure("polyhead_output_tokens_total"), figure("polyhead_prompt_tokens_total")
    ask(client, COMPLETIONS, model="tiny", prompt="Twice", temperature=0, max_tokens=6)
    assert figure("polyhead_output_tokens_total") == before[0] + 6
    assert figure("polyhead_prompt_tokens_total") >= before[1] + 1
    assert figure("polyhead_requests_running") == 0
    assert figure('polyhead_requests_total{path="/v1/completions",status="200"}') >= 1


def test_adapters_are_models_of_their_own(model: ph.LanguageModel, tmp_path: Path) -> None:
    folders = {name: lora(tmp_path / name, model.transformer, "q_proj up_proj") for name in "ab"}
    served = models_of(model, {"adapters": folders})
    body: dict[str, Any] = {"prompt": "Twice", "temperature": 0, "max_tokens": 8}
    with asking(served) as client:
        listed = {
            each["id"]: each.get("parent") for each in client.get("/v1/models").json()["data"]
        }
        assert listed == {"tiny": None, "vectors": None, "a": "tiny", "b": "tiny"}
        assert client.get("/v1/models/tiny:b").json()["id"] == "b"
        plain = ask(client, COMPLETIONS, **body)  # no model: the only decoder, without an adapter
        adapted = [ask(client, COMPLETIONS, model=name, **body) for name in ("a", "tiny:a")]
        assert [each["model"] for each in (plain, *adapted)] == ["tiny", "a", "a"]
        answer = client.post(COMPLETIONS, json={"model": "law", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.json()["error"]["message"].endswith("tiny, vectors, a, b")
        assert 'model="a"' not in client.get("/metrics").text
    single = copy.deepcopy(model)
    ph.attach_adapter(single, folders["a"])
    for made, alone in ((plain, model), *((each, single) for each in adapted)):
        text = alone.generate("Twice", max_new_tokens=8).text
        assert made["choices"][0]["text"] == text
    assert plain["choices"] != adapted[0]["choices"]
    with pytest.raises(InputError, match="two models or adapters are called 'vectors'"):
        models_of(model, {"adapters": {"vectors": folders["a"]}})


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_answers_of_a_schema_are_of_the_schema(client: TestClient) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {"model": "tiny", "messages": MESSAGES, "seed": 5, "n": 4, "temperature": 2.0}
    made = ask(client, CHAT, **body, response_format=form, max_tokens=120)
    for choice in made["choices"]:
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["message"]["content"])
        assert list(found) == ["name", "age", "tags"]
        assert len(found["name"]) <= 5
        assert 10 <= found["age"] <= 99
        assert 1 <= len(found["tags"]) <= 2
        assert {*found["tags"]} <= {"x", "y"}
    again = ask(client, CHAT, **body, response_format=form, max_tokens=120)
    assert again["choices"] == made["choices"]
    texts = {choice["message"]["content"] for choice in made["choices"]}
    assert len(texts) == 4  # one copy of the grammar for each answer
    for bad in ({"type": "nothing"}, {"$ref": "#/nowhere"}):
        answer = client.post(
            CHAT,
            json={
                **body,
                "response_format": {"type": "json_schema", "json_schema": {"schema": bad}},
            },
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"
    assert math.isfinite(made["created"])
