"""``polyhead batch``: files of requests in OpenAI's format, answered and continued."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from served_tiny import models_of

import polyhead as ph
from polyhead.errors import InputError
from polyhead.serving.http.api import Api
from polyhead.serving.http.batch import answered, read_batch, run_batch

PROMPTS = [f"text {number}" for number in range(7)]


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    options = {"model": "tiny", "temperature": 0, "max_tokens": 4, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": options})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [line(f"n{number}", prompt=text) for number, text in enumerate(PROMPTS)]
    lines.insert(3, "")
    lines.append(line("bad", prompt="a", echo=True))
    lines.append(line("streamed", prompt="a", stream=True))
    vectors = {"model": "vectors", "input": ["a"]}
    lines.append(
        json.dumps({"custom_id": "v", "method": "POST", "url": "/v1/embeddings", "body": vectors})
    )
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run(
    tiny: ph.LanguageModel,
    file: Path,
    out: Path,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[int, list[int]]:
    batch, counts = read_batch(file), []
    models = models_of(tiny, engine)
    models.start()
    try:
        refused = asyncio.run(
            run_batch(
                Api(models), batch, out, answered(out, batch), advance=counts.append, **options
            )
        )
    finally:
        models.close(5)
    return refused, counts


def answers(out: Path) -> dict[str, Any]:
    found = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"] for each in found}


def test_every_request_is_answered_once(
    model: ph.LanguageModel, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    refused, counts = run(model, file, out, at_once=3)
    found = answers(out)
    assert refused == 2
    assert counts == list(range(1, 11))
    for number, prompt in enumerate(PROMPTS):
        response = found[f"n{number}"]
        assert response["status_code"] == 200
        text = model.generate(prompt, max_new_tokens=4).text
        assert response["body"]["choices"][0]["text"] == text
    assert found["bad"]["status_code"] == 400
    assert found["bad"]["body"]["error"]["param"] == "echo"
    assert found["streamed"]["body"]["error"]["param"] == "stream"
    assert len(found["v"]["body"]["data"][0]["embedding"]) == 32


def test_an_interrupted_batch_goes_on_where_it_was(
    model: ph.LanguageModel, file: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(model, file, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # the power went
    _, counts = run(model, file, out)
    assert counts == list(range(5, 11))
    kept, again = answers(whole), answers(out)
    assert again.keys() == kept.keys()
    for name, response in again.items():
        if name.startswith("n"):
            assert response["body"]["choices"] == kept[name]["body"]["choices"]
    assert run(model, file, out)[1] == []


def test_requests_that_find_a_full_queue_wait(
    model: ph.LanguageModel, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert run(model, file, out, {"max_rows": 1, "max_queue": 1}, at_once=10)[0] == 2
    assert {each["status_code"] for each in answers(out).values()} == {200, 400}


def test_one_model_answers_whatever_the_requests_name(
    model: ph.LanguageModel, tmp_path: Path
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    file.write_text(line("x", prompt="a", model="gpt-4o"))
    assert read_batch(file).models == ("gpt-4o",)
    assert run(model, file, out, model="tiny")[0] == 0
    assert answers(out)["x"]["body"]["model"] == "tiny"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no requests"),
        ("{", "line 1 is not JSON"),
        ("5", "line 1 must be an object: got 5"),
        (f"{line('a')}\n{line('a')}", "line 2: custom_id 'a' stands twice"),
        (line(""), "custom_id must be a text"),
        (line("a", url="/v1/models"), "url must be one of"),
        (line("a").replace("POST", "GET"), "method must be 'POST': got 'GET'"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": 1}', "body must"),
    ],
)
def test_a_line_that_is_no_request_is_named(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=words):
        read_batch(file)


def test_answers_to_other_requests_are_not_added_to(file: Path, tmp_path: Path) -> None:
    out, batch = tmp_path / "out.jsonl", read_batch(file)
    for content, words in (
        ('{"custom_id": "z"}\n', "answers 'z', which"),
        ("{}\n", "line 1 is no answer of a batch"),
        ("a text\n", "line 1 is no answer of a batch"),
    ):
        out.write_text(content)
        with pytest.raises(InputError, match=words):
            answered(out, batch)
        assert out.read_text() == content
    with pytest.raises(InputError, match="cannot read"):
        read_batch(tmp_path / "nowhere.jsonl")
