"""``polyhead serve`` and ``polyhead batch`` as commands."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process import Run

from polyhead.cli.models import adapters_of, load_served
from polyhead.errors import InputError, UnsupportedError

pytest.importorskip("prometheus_client")


def request(name: str, **body: object) -> str:
    options = {"model": "gpt-4o", "prompt": "a", "max_tokens": 3, "temperature": 0, **body}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": options}
    return json.dumps(line) + "\n"


def test_a_file_of_requests_is_answered_and_then_continued(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    file, out = tmp_path / "asked.jsonl", tmp_path / "asked.answers.jsonl"
    file.write_text(request("a") + request("b"))
    result = run("batch", "asked.jsonl", "--model", tiny)
    assert (result.code, result.out) == (0, "")
    assert "2 answers are in asked.answers.jsonl" in result.err
    kept = out.read_bytes()
    file.write_text(request("a") + request("b") + request("c", echo=True))
    result = run("batch", "asked.jsonl", "--model", tiny)
    assert result.code == 1
    assert "2 of 3 are answered already" in result.err
    assert "1 of them are errors" in result.err
    assert out.read_bytes().startswith(kept)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers[2:]] == ["c"]
    assert answers[2]["response"]["status_code"] == 400


def test_a_batch_names_the_line_that_is_wrong(run: Run, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(request("a") + "{}\n")
    run("batch", "asked.jsonl", "-m", tiny).refused(2, "line 2: custom_id must be a text")
    run("batch", "nowhere.jsonl", "-m", tiny).refused(2, "cannot read 'nowhere.jsonl'")
    (tmp_path / "asked.jsonl").write_text(request("a"))
    run("batch", "asked.jsonl").refused(2, "no model 'gpt-4o'")


def test_a_server_that_cannot_be_is_refused_before_it_loads(run: Run, tiny: str) -> None:
    run("serve", tiny, "--host", "0.0.0.0").refused(2, "--host 0.0.0.0 needs a key")
    run("serve", tiny, "--key", "short").refused(2, "a key must be at least 8")
    run("serve", tiny, POLYHEAD_KEY="short").refused(2, "a key must be at least 8")
    run("serve", tiny, "--timeout", "soon").refused(2, "--timeout must be a time")
    run("serve", tiny, tiny).refused(2, "two models are called 'tiny-llama'")
    for options, words in (
        ((tiny,), "several models on 2 processes (WORLD_SIZE) cannot be"),
        (("--adapter", "law=x"), "--adapter on 2 processes"),
        (("--show-heads",), "--show-heads on 2 processes"),
        (("--device", "cuda"), "--device on 2 processes"),
    ):
        run("serve", tiny, *options, WORLD_SIZE="2").refused(2, words)
    run("serve", tiny, WORLD_SIZE="two").refused(2, "WORLD_SIZE must be a number", "'two'")
    run("route", "http://a:1", "b:2").refused(2, "a server must be http://HOST:PORT", "'b:2'")


def test_adapters_are_given_to_the_decoder_that_they_name() -> None:
    assert adapters_of(["m"], ["law=a/b=c", "m:poems=d"]) == {"m": {"law": "a/b=c", "poems": "d"}}
    assert adapters_of(["m", "n:8b"], ["n:8b:law=x", "m:law=y"]) == {
        "n:8b": {"law": "x"},
        "m": {"law": "y"},
    }
    for decoders, given, words in (
        (["m"], ["law"], "--adapter must be NAME=DIR: got 'law'"),
        (["m"], ["=x"], "--adapter must be NAME=DIR"),
        (["m", "n"], ["law=x"], "write MODEL:NAME=DIR, with one of the served decoders: m, n"),
        ([], ["law=x"], "there are none"),
        (["m"], ["law=x", "m:law=y"], "two adapters are called 'law'"),
    ):
        with pytest.raises(InputError, match=words):
            adapters_of(decoders, given)


def test_a_draft_guesses_for_the_only_decoder(tiny: str) -> None:
    engine = {"max_tokens": 64, "draft_tokens": 2}
    served = load_served({"a": tiny}, None, "cpu", engine, draft=tiny)["a"].engine
    assert served is not None
    plain = load_served({"a": tiny}, None, "cpu", engine)["a"].engine
    assert plain is not None
    assert served.stats.pool_bytes > plain.stats.pool_bytes
    with pytest.raises(InputError, match="--draft guesses tokens of one decoder: got 2 of them"):
        load_served({"a": tiny, "b": tiny}, None, "cpu", engine, draft=tiny)
    with pytest.raises(UnsupportedError, match="of which no multi-token predictor is read"):
        load_served({"a": tiny}, None, "cpu", engine, draft="mtp")


@pytest.mark.slow
def test_sigterm_lets_a_stream_finish_and_then_ends(tiny: str) -> None:
    command = [sys.executable, "-m", "polyhead.cli", "serve", tiny, "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"POLYHEAD_KEY": "a-long-key"}
    ) as server:
        assert server.stderr is not None
        fits, address = server.stderr.readline(), server.stderr.readline()
        assert re.match(r"tiny-llama: weights .* KiB · cache .* tokens", fits), fits
        port = int(re.search(r":(\d+)/v1", address)[1])  # type: ignore[index]
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": "a", "max_tokens": 90, "stream": True}
        key = {"Authorization": "Bearer a-long-key"}
        client.request("POST", "/v1/completions", json.dumps(body), key)
        answer = client.getresponse()
        said = answer.read(20)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        said += answer.read()
        assert said.endswith(b"data: [DONE]\n\n")
        client.close()
        server.wait(30)
        assert time.monotonic() - began < 30
        assert server.returncode in (-signal.SIGTERM, 0)
