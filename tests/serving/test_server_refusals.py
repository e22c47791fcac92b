"""What the API refuses: by name, in OpenAI's form, without harm to others."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from served_tiny import CONTEXT, asking, models_of
from starlette.testclient import TestClient

import polyhead as ph
from polyhead.errors import InputError
from polyhead.serving.http import guard
from polyhead.serving.http.options import CHAT, COMPLETIONS, EMBEDDINGS, TABLES, TRANSCRIPTIONS
from polyhead.serving.http.server import check_reach, checked_keys

ROOT = Path(__file__).parents[2]
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]


def chat(**body: Any) -> tuple[str, dict[str, Any]]:
    return CHATS, {"model": "tiny", "messages": MESSAGES, **body}


def text(**body: Any) -> tuple[str, dict[str, Any]]:
    return TEXTS, {"model": "tiny", "prompt": "a", **body}


def said(role: str, content: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[{"role": role, "content": content, **more}])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (chat(tempreature=1), "tempreature", "did you mean temperature?"),
        (chat(temperature=3), "temperature", "at least 0 and at most 2: got 3"),
        (chat(temperature=True), "temperature", "got True"),
        (chat(top_p=0), "top_p", "above 0"),
        (chat(n=33), "n", "from 1 to 32: got 33"),
        (text(n=32, prompt=["a"] * 5), "n", "at most 128 texts: got 160"),
        (chat(stop=["a", ""]), "stop", "none of them empty"),
        (chat(stop=["a"] * 17), "stop", "at most 16"),
        (chat(seed=-1), "seed", "seed must be"),
        (chat(seed=2**70), "seed", "64 bits"),
        (chat(stream="yes"), "stream", "True or False"),
        (chat(stream_options={"include_usage": True}), "stream_options", "needs stream=true"),
        (chat(logit_bias={"x": 1}), "logit_bias", "a key must be a token id: got 'x'"),
        (chat(logit_bias={"9999": 1}), "logit_bias", "token ids are below 259: got 9999"),
        (chat(logit_bias={"1": 101}), "logit_bias", "at most 100"),
        (chat(top_logprobs=2), "top_logprobs", "needs logprobs=true"),
        (text(logprobs=6), "logprobs", "from 0 to 5: got 6"),
        (chat(max_tokens=2, max_completion_tokens=2), "max_tokens", "mutually exclusive"),
        (chat(max_tokens=CONTEXT), "max_tokens", f"the model's context holds {CONTEXT}"),
        (chat(store=True), "store", "store is not supported (only false): nothing is stored"),
        (chat(modalities=["audio"]), "modalities", 'only ["text"]'),
        (chat(functions=[]), "functions", "use `tools`"),
        (chat(response_format={"type": "xml"}), "response_format", "got 'xml'"),
        (chat(tools=[TOOL]), "tools", "this model's chat template knows none"),
        (chat(tools=[{"type": "x"}]), "tools", "tools[0] must be of type 'function'"),
        (chat(tool_choice="required"), "tool_choice", "needs tools"),
        (chat(messages=[]), "messages", "at least one"),
        (chat(messages=[5]), "messages", "messages[0] must be an object: got 5"),
        (said("robot", "a"), "messages", "got 'robot'"),
        (said("user", 5), "messages", "messages[0].content must be a text: got 5"),
        (said("user", [{"type": "image_url"}]), "messages", "of type 'text': got 'image_url'"),
        (said("user", "a", colour=1), "messages", "unknown key 'colour'"),
        (said("user", "x" * 9_000), "messages", "the prompt has"),
        (text(prompt=[[1], "a"]), "prompt", "prompt must be"),
        (text(prompt=[1, 999]), "prompt", "0 to 258: got 999"),
        (text(prompt=""), "prompt", "empty"),
        (text(prompt="x" * 600), "prompt", "the prompt has 600 tokens"),
        (text(prompt="\ud800"), "prompt", "half a surrogate pair"),
        (text(echo=True), "echo", "only false"),
        ((TEXTS, {"model": "tiny"}), "prompt", "prompt is missing"),
        ((TEXTS, {"\ud800": 1}), "\\ud800", "unknown option"),
        (text(model="vectors"), "model", "/v1/completions takes decoders: vectors is none"),
        (("/v1/embeddings", {"model": "vectors", "input": [1, 2]}), "input", "input[0] must be"),
        (("/v1/embeddings", {"model": "vectors", "input": "a", "dimensions": 5}), "dimensions", ""),
        (("/v1/embeddings", {"model": "vectors", "input": ["x" * 999]}), "input", "999 tokens"),
        (("/v1/embeddings", {"model": "vectors", "input": ["a", ""]}), "input", "text 1 is empty"),
        (chat(messages=[{"role": "user", "content": "\ud800"}]), None, "half a surrogate pair"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(
    request_: tuple[str, dict[str, Any]], param: str | None, words: str, client: TestClient
) -> None:
    path, body = request_
    answer = client.post(path, content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param, error
    assert words in error["message"]
    assert len(error["message"]) < 600


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{", 400, "the request is not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"\xff{}", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b'{"model": "tiny", "model": "tiny"}', 400, "stands twice"),
        (b'{"model": "gpt-4o", "prompt": "a"}', 404, "model 'gpt-4o' is not served: tiny, vectors"),
        (b'{"model": 5, "prompt": "a"}', 400, "model must be a string"),
    ],
)
def test_a_body_that_is_none_is_refused(
    content: bytes, status: int, words: str, client: TestClient
) -> None:
    answer = client.post(TEXTS, content=content)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_addresses_and_methods_that_are_none_are_refused_in_the_same_form(
    client: TestClient,
) -> None:
    for answer, status in (
        (client.get("/v1/nothing"), 404),
        (client.get(CHATS), 405),
        (client.post("/v1/models", json={}), 405),
        (client.post("/v1/audio/transcriptions", json={}), 400),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_neutral_values_of_refused_options_are_accepted(client: TestClient) -> None:
    neutral = {name: o.neutral[0] for name, o in CHAT.items() if o.read is None and o.neutral}
    assert len(neutral) >= 6
    absent = dict.fromkeys(CHAT.keys() - {"messages", "model", "max_tokens", *neutral})
    path, body = chat(max_tokens=1, user="me", metadata={"a": "b"}, **neutral)
    assert client.post(path, json=absent | body).status_code == 200
    path, body = text(max_tokens=1, suffix="")
    assert client.post(path, json=body).status_code == 200


def test_every_option_of_openai_is_in_the_table() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.audio import transcription_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    ours = {"top_k", "min_p", "repetition_penalty"}
    for table, theirs, extra in (
        (CHAT, chat_create_params.CompletionCreateParamsBase, {"stream", *ours}),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase, {"stream", *ours}),
        (EMBEDDINGS, embedding_create_params.EmbeddingCreateParams, set()),
        (TRANSCRIPTIONS, transcription_create_params.TranscriptionCreateParamsBase, {"stream"}),
    ):
        assert table.keys() == get_type_hints(theirs).keys() | extra
    assert set(TABLES) == {CHATS, TEXTS, "/v1/embeddings", "/v1/audio/transcriptions"}


def test_the_page_lists_the_options_of_the_tables() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import server_page

    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    assert server_page.with_tables(page) == page, "run: python tools/server_page.py"


def test_without_a_key_only_this_machine_is_served(client: TestClient) -> None:
    for host in ("localhost", "127.0.0.1:8000", "[::1]:80"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example", "", "[", "127.0.0.1@evil.example"):
        answer = client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 400, host
    for origin, status in (
        ("http://localhost:3000", 200),
        ("https://evil.example", 403),
        ("null", 403),
    ):
        answer = client.get("/v1/models", headers={"Origin": origin})
        assert answer.status_code == status, origin


def test_with_keys_every_request_brings_one(model: ph.LanguageModel) -> None:
    with asking(models_of(model), keys=["first-key", "second-key"]) as client:
        for header in (
            "",
            "Bearer",
            "Bearer x",
            "Basic first-key",
            "Bearer first-key2",
            "first-key",
        ):
            answer = client.get("/v1/models", headers={"Authorization": header})
            assert answer.status_code == 401, header
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
            assert "first-key" not in answer.text
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}", "Host": "any.example"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/health", headers={"Host": "any.example"}).status_code == 200


def test_the_load_is_told_with_a_key_and_heads_to_the_caller_whose_they_are(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = models_of(model)
    engine = models["tiny"].engine
    assert engine is not None
    step = engine.step

    def slow() -> bool:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
    with asking(models, keys=["first-key", "second-key"], page="<p>", show_heads=True) as client:
        assert (client.get("/").text, client.get("/load").status_code) == ("<p>", 401)
        assert client.get("/load/head").status_code == 401
        name = hashlib.sha256(b"first-key").hexdigest()
        asked = engine.submit("Twice", max_new_tokens=200, share_with=name)
        next(iter(asked))
        found = [client.get("/load", headers=headers).json() for headers in (first, second)]
        (tiny, vectors), (row,) = found[0]["models"], found[0]["models"][0]["requests"]
        assert vectors == {"name": "vectors", "waiting": 0}
        assert (tiny["live"], tiny["used_pages"], tiny["free_pages"]) == (1, 13, 243)
        assert (row["id"], row["read_tokens"], row["limit"]) == (asked.id, 5, 200)
        assert [each["models"][0]["requests"][0]["mine"] for each in found] == [True, False]
        assert name not in str(found)
        where = {"request": asked.id, "layer": "1", "head": "2"}
        assert client.get("/load/head", params=where, headers=second).status_code == 404
        for wrong in ({"layer": "x"}, {"head": "-1"}, {"head": "4"}, {"layer": "2"}):
            answer = client.get("/load/head", params=where | wrong, headers=first)
            assert answer.status_code == 400, wrong
        seen = client.get("/load/head", params=where, headers=first).json()
        assert seen["tokens"][:5] == [*"Twice"]
        assert len(seen["tokens"]) == len(seen["weights"])
        assert sum(seen["weights"]) == pytest.approx(1, abs=1e-4)
        asked.cancel()
    with asking(models_of(model)) as client:
        assert client.get("/").status_code == 404
        assert "--show-heads" in client.get("/load/head").json()["error"]["message"]


def test_callers_have_names_of_their_keys(model: ph.LanguageModel) -> None:
    seen = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"]["caller"])

    checking = guard.Guard(inner, ["first-key", "second-key"])
    client = TestClient(checking, raise_server_exceptions=False)
    for key in ("first-key", "second-key", "first-key"):
        client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert seen[0] == seen[2] != seen[1]
    assert "first" not in seen[0]


def test_callers_of_different_keys_share_nothing(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, groups = models_of(model), []
    engine = models["tiny"].engine
    assert engine is not None
    submit = engine.submit

    def seen(*arguments: Any, share_with: str = "", **options: Any) -> Any:
        groups.append(share_with)
        return submit(*arguments, share_with=share_with, **options)

    monkeypatch.setattr(engine, "submit", seen)
    with asking(models, keys=["first-key", "second-key"]) as client:
        for key in ("first-key", "second-key", "first-key"):
            path, body = text(max_tokens=1)
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post(path, json=body, headers=headers).status_code == 200
    assert groups[0] == groups[2] != groups[1]


@pytest.mark.parametrize("depth", [60, 300, 1_000, 20_000])
def test_deep_schemas_are_answered_or_refused(depth: int, client: TestClient) -> None:
    deep = '{"type": "object", "properties": {"a": ' * depth + '{"type": "integer"}' + "}}" * depth
    head = '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
    form = f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}}}'
    answer = client.post(CHATS, content=head + form)
    assert answer.status_code == (200 if depth < 100 else 400), answer.text
    assert len(answer.text) < 1_000


def test_schemas_that_harm_are_refused_before_an_answer_begins(client: TestClient) -> None:
    pytest.importorskip("llguidance")
    named = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(3_000)}
    for schema, words in (
        ({"enum": ["x" * 1_000_000]}, "1,000,014 characters"),
        ({"$ref": "#/$defs/a0", "$defs": named | {"a3000": True}}, "too complex"),
        ({"$ref": "#"}, "cannot be used"),
    ):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        path, body = chat(response_format=form, stream=True)
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "invalid_json_schema")
        assert words in error["message"]
    path, body = chat(max_tokens=1)
    assert client.post(path, json=body).status_code == 200


def test_more_requests_than_the_server_runs_are_refused(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_REQUESTS", 0)
    with asking(models_of(model)) as client:
        answer = client.get("/health")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


def test_a_bug_is_an_error_without_its_words(model: ph.LanguageModel) -> None:
    models = models_of(model)

    def broken(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("a secret")

    with asking(models) as client:
        models["tiny"].engine.submit = broken  # type: ignore[method-assign, union-attr]
        path, body = text()
        answer = client.post(path, json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


def test_errors_are_answered_without_a_thread(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends closes its loop before a thread has made the answer."""
    monkeypatch.setattr("starlette._exception_handler.run_in_threadpool", None)
    monkeypatch.setattr("starlette.middleware.errors.run_in_threadpool", None)
    path, body = text(temperature=3)
    assert client.post(path, json=body).status_code == 400


def test_keys_and_addresses_of_the_command_are_checked() -> None:
    for key in ("", "short", "with a blank", "schlüssel-eins"):
        with pytest.raises(InputError, match="a key must be at least 8"):
            checked_keys([key])
    assert checked_keys(["long-enough"]) == ["long-enough"]
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        check_reach(host, [])
    for host in ("0.0.0.0", "::", "example.org", "192.168.1.5"):
        with pytest.raises(InputError, match="needs a key"):
            check_reach(host, [])
        check_reach(host, ["a-long-key"])
