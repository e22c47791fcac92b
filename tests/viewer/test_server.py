"""The local server answers malformed requests in words, and limits connections and waiting."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny import byte_tokenizer, decoder

import polyhead as ph
from browser.serving import TEXT, TOKEN, serving
from polyhead.viewer import server
from polyhead.viewer.studio import Studio

Ask = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


@pytest.fixture
def port(model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name, value in (("BODY_SECONDS", 0.4), ("MOST_CONNECTIONS", 8)):
        monkeypatch.setattr(server, name, value)
    for address in serving(Studio(lambda name: model, ["tiny"]), TEXT):
        yield int(address.rstrip("/").rpartition(":")[2])


@pytest.fixture
def ask(port: int) -> Ask:
    def ask(path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection.request(method, f"/{TOKEN}/{path}", content, headers)
        answer = connection.getresponse()
        words = answer.read().decode()
        connection.close()
        return answer.status, words

    return ask


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "a", "heads": 5}, "heads must be a list of pairs [layer, head]"),
        ({"text": "a", "heads": [1]}, "heads must be a list of pairs"),
        (b'{"text": "a", "heads": [[1e400, 1]]}', "heads must be a list of pairs"),
        ({"text": "a", "heads": [[None, 1]]}, "heads must be a list of pairs"),
        ({"text": "a", "heads": [[True, 1]]}, "heads must be a list of pairs"),
        ({"text": "a", "heads": [[0, 99]]}, "99"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[]", "is not a JSON object"),
        ({"text": ["a"]}, "text must be a string: got ['a']"),
        ({"text": "a", "model": {}}, "model must be a string"),
        ({"text": "a", "model": "x" * 9_999}, "model must be one of tiny"),
        ({"text": "\ud800"}, "half a surrogate pair"),
        ({"text": " "}, "the text is empty"),
    ],
)
def test_malformed_requests_are_refused_in_words(body: object, words: str, ask: Ask) -> None:
    status, answer = ask("look", body)
    assert status == 400
    assert words in answer
    assert len(answer) < 500


def test_numbers_of_thousands_of_digits_are_refused_in_words(ask: Ask) -> None:
    paths = ("next/%s", "page/%s", "row/%s/0/0/0", "region/0/%s/0", "thumbnails/0/%s", "way/0/%s")
    for path in paths:
        status, answer = ask(path % ("9" * 3_000), {} if "next" in path else None)
        assert 400 <= status < 500, path
        assert len(answer) < 500


def test_a_body_over_the_limit_is_refused_before_it_is_read(port: int) -> None:
    # The body is never sent: a server that waits for it lets the client's patience end.
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        head = f"POST /{TOKEN}/look HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "line",
    [
        b"GET *",
        b"OPTIONS *",
        b"GET " + TOKEN.encode(),
        b"CONNECT localhost:443",
        b"GET localhost",
        b"GET http://localhost",
        b"GET http://localhost/",
        b"GET http://localhost/%b/progress" % TOKEN.encode(),
        b"GET ?",
        b"GET #",
        b"GET ",
        b"GET //",
        b"GET /..",
        b"GET /%",
        b"GET /%zz/%",
        b"GET /%ff%fe/",
        b"GET /%ed%a0%80/",
        b"GET /%00",
        b"GET /%b/%%00" % TOKEN.encode(),
        b"GET /%b/row/%%ff/0/0/0" % TOKEN.encode(),
        b"GET /\0",
        b"GET /\xff",
        b"GET /%b/\xff" % TOKEN.encode(),
        b"GET /a b",
        b"GET /" + b"x" * 200_000,
        b"\0 /",
        b"BREW /",
        b"BREW /%b/" % TOKEN.encode(),
    ],
    ids=lambda line: repr(line[:40]),
)
def test_odd_request_lines_get_an_answer_of_the_clients_fault(line: bytes, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(line + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = client.recv(1000)
    assert re.match(rb"HTTP/1.1 4[0-9][0-9] ", answer), answer


def test_a_body_that_does_not_come_is_waited_for_no_longer(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        head = f"POST /{TOKEN}/look HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
        client.sendall(head.encode() + b'{"te')
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_requests_over_the_limit_of_connections_are_refused(port: int, ask: Ask) -> None:
    clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(8)]
    assert ask("progress")[0] == 503
    for client in clients:
        client.close()
    wait_until = time.monotonic() + 10
    while (status := ask("progress")[0]) == 503 and time.monotonic() < wait_until:
        time.sleep(0.05)
    assert status == 200


def test_a_client_that_goes_away_stops_the_run(
    port: int, ask: Ask, model: ph.LanguageModel
) -> None:
    ran: list[int] = []
    slow = model.transformer.layers[0].register_forward_pre_hook(lambda *call: time.sleep(1.5))
    last = model.transformer.layers[-1].register_forward_hook(lambda *call: ran.append(1))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            body = b'{"text": "a text"}'
            head = f"POST /{TOKEN}/look HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            time.sleep(0.7)
            assert json.loads(ask("progress")[1]) == {"done": 0, "layers": 2}
        time.sleep(1.6)
        assert ran == []
    finally:
        slow.remove()
        last.remove()
    assert ask("look", {"text": "again"})[0] == 200
    assert json.loads(ask("progress")[1]) == {"done": 2, "layers": 2}
