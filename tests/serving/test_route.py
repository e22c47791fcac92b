"""The router sends requests that begin alike to one server, and to the next where it is down."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served_tiny import events_of, listening, models_of, post, tiny_decoder

from polyhead.errors import InputError
from polyhead.serving.http.route import Router, address_of, prefix_of, route

TEXTS = "/v1/completions"


@contextmanager
def routing(router: Router) -> Iterator[int]:
    """The port of a router on a thread."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(route(router, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        time.sleep(0.05)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=60)
        loop.close()


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 5, "temperature": 0, **more}


def test_prefixes_keep_their_server_and_the_others_share_those_of_one_that_fails() -> None:
    urls = [f"http://host-{n}:80" for n in range(4)]
    router = Router(urls)
    asked = [json.dumps(body(f"{n} " * 200)).encode() for n in range(400)]
    first = [router.order(prefix_of(each))[0] for each in asked]
    counts = [first.count(url) for url in urls]
    assert min(counts) > 60, counts
    longer = [json.dumps(body(f"{n} " * 200 + "and more")).encode() for n in range(400)]
    assert [router.order(prefix_of(each))[0] for each in longer] == first
    fewer = [Router(urls[:3]).order(prefix_of(each))[0] for each in asked]
    assert all(a == b for a, b in zip(first, fewer, strict=True) if a != urls[3])
    router.down[urls[0]] = time.monotonic() + 60
    assert {router.order(prefix_of(each))[-1] for each in asked} == {urls[0]}
    assert prefix_of(b"[" * 9999) != prefix_of(b"{") != prefix_of(b'"text"')


def test_requests_pass_to_servers_that_are_up() -> None:
    model = tiny_decoder()
    first, second = models_of(model), models_of(model)
    texts_sent = [letter * 40 for letter in "abcdefghijklmnopqrst"]  # to either, but once in 2^19
    with listening(second) as up, socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
        closed.close()
        with listening(first) as other:
            urls = [f"http://127.0.0.1:{port}" for port in (up, other, dead)]
            with routing(Router(urls)) as port:
                answers = [post(port, TEXTS, body(text)) for text in texts_sent]
                again = [post(port, TEXTS, body(text)) for text in texts_sent]
        assert [status for status, _ in answers + again] == [200] * 40
        texts = [answer["choices"] for _, answer in answers]
        assert [answer["choices"] for _, answer in again] == texts
        alone = [post(up, TEXTS, body(text))[1]["choices"] for text in texts_sent]
        assert texts == alone
        engines = [each["tiny"].engine for each in (first, second)]
        assert all(each is not None and each.stats.cached_tokens >= 32 for each in engines)
        with routing(Router(urls)) as port:  # the second of three is down now too
            assert {post(port, TEXTS, body(text))[0] for text in texts_sent[:4]} == {200}
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("POST", TEXTS, json.dumps(body("a", stream=True, max_tokens=9)))
            answer = client.getresponse()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert len(events_of(answer.read().decode())) == 10
            client.request("GET", "/v1/models")
            assert client.getresponse().status == 200
            client.close()
            status, said = post(port, TEXTS, body("a", model="no-such"))
            assert (status, said["error"]["code"]) == (404, "model_not_found")
    with routing(Router(urls)) as port:
        status, said = post(port, TEXTS, body("a"))
        assert (status, said["error"]["message"]) == (503, "none of 3 servers answers")


def test_a_client_that_goes_away_cancels_its_request() -> None:
    models = models_of(tiny_decoder())
    engine = models["tiny"].engine
    assert engine is not None
    with listening(models) as up, routing(Router([f"http://127.0.0.1:{up}"])) as port:
        client = socket.create_connection(("127.0.0.1", port))
        sent = json.dumps(body("a", stream=True, max_tokens=500)).encode()
        head = f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        client.sendall(head.encode() + sent)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()
        end = time.monotonic() + 20
        while engine.stats.live and time.monotonic() < end:
            time.sleep(0.02)
        assert engine.stats.live == 0
        assert engine.stats.output_tokens < 480


@pytest.mark.parametrize("left", [b"", b"10\r\ndata: {"])
def test_a_stream_that_breaks_off_between_two_events_ends_with_an_error(left: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        routing(Router([f"http://127.0.0.1:{server.getsockname()[1]}"])) as port,
    ):
        client = socket.create_connection(("127.0.0.1", port), timeout=20)
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        worker, _ = server.accept()
        worker.recv(999)
        sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: {}x\n\n\r\n"
        worker.sendall(sent + left)
        worker.close()
        said = b""
        while more := client.recv(9_999):
            said += more
        client.close()
    assert said.startswith(sent + left)
    added = said[len(sent + left) :]
    if left:
        assert added == b""
        return
    size, _, rest = added.partition(b"\r\n")
    event, end = rest[: int(size, 16)].decode(), rest[int(size, 16) :]
    assert end == b"\r\n0\r\n\r\n"
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "server_gone"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Transfer-Encoding: chunked", 411),
        ("Content-Length: 1\r\nContent-Length: x", 411),
        ("Content-Length: -1", 411),
        ("Content-Length: 99999999", 413),
    ],
)
def test_requests_of_unclear_length_are_refused(header: str, status: int) -> None:
    with routing(Router(["http://127.0.0.1:9"])) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
        assert client.recv(999).startswith(f"HTTP/1.1 {status} ".encode())
        client.close()


def test_addresses_that_are_none_are_refused() -> None:
    assert address_of("http://a:8000/") == ("a", 8000, False)
    assert address_of("https://a.example") == ("a.example", 443, True)
    for url in ("a:8000", "ftp://a", "http://", "http://a/v1", "http://u:p@a", "http://a:x"):
        with pytest.raises(InputError, match="a server must be http://HOST:PORT"):
            address_of(url)
