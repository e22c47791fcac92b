"""Clients that break off, wait or do not read harm nobody else."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from served_tiny import listening, models_of, post

import polyhead as ph
from polyhead.serving.http import body, connections
from polyhead.serving.http.served import Models, Worker

TEXTS = "/v1/completions"


@pytest.fixture
def models(model: ph.LanguageModel) -> Models:
    return models_of(model, {"max_rows": 2, "max_queue": 2})


@pytest.fixture
def port(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for module, name, value in (
        (body, "BODY_SECONDS", 0.4),
        (connections, "HEAD_SECONDS", 0.4),
        (connections, "UNREAD_SECONDS", 0.4),
    ):
        monkeypatch.setattr(module, name, value)
    with listening(models) as found:
        yield found


@pytest.fixture
def slowly(model: ph.LanguageModel) -> Iterator[None]:
    """Steps take 20 ms."""
    hook = model.transformer.layers[0].register_forward_pre_hook(lambda *call: time.sleep(0.02))
    yield
    hook.remove()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def head(length: int, path: str = TEXTS) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def request(**options: Any) -> bytes:
    content = json.dumps({"model": "tiny", "prompt": "a", **options}).encode()
    return head(len(content)) + content


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def counts(models: Models) -> tuple[int, int]:
    """Requests that are computed, and those that wait."""
    stats = models["tiny"].engine.stats  # type: ignore[union-attr]
    return stats.live, stats.queued


def has(models: Models, wanted: tuple[int, int]) -> bool:
    return counts(models) == wanted


def idle(models: Models) -> bool:
    return has(models, (0, 0))


def test_a_body_over_the_limit_is_refused_before_it_is_read(port: int) -> None:
    with connected(port) as client:
        client.sendall(head(99_999_999))
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_waited_for_no_longer(port: int) -> None:
    with connected(port) as client:
        client.sendall(head(50) + b'{"mo')
        assert client.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("part", "pause", "seconds", "status"),
    [(1 << 20, 0.0, 60.0, 413), (1, 0.05, 0.4, 408)],
    ids=["flood", "trickle"],
)
def test_a_body_that_never_ends_is_refused(
    part: int,
    pause: float,
    seconds: float,
    status: int,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", seconds)
    with connected(port) as client:
        said, sent = b"", 0
        client.sendall(head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        client.setblocking(False)
        while not said and sent < 200 << 20:
            chunk, pieces = b"%x\r\n" % part + b"x" * part + b"\r\n", 0
            while pieces < len(chunk) and not said:
                with suppress(BlockingIOError):
                    said = client.recv(100)
                with suppress(BlockingIOError, ConnectionError):
                    pieces += client.send(chunk[pieces:])
            sent += part
            time.sleep(pause)
        assert said.startswith(f"HTTP/1.1 {status} ".encode())


def test_more_connections_than_a_server_has_are_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60)
    with connected(port), connected(port), connected(port) as third, suppress(ConnectionError):
        assert third.recv(100) == b""

    def answered() -> bool:
        with suppress(ConnectionError):
            return post(port, TEXTS, {"model": "tiny", "prompt": "a", "max_tokens": 2})[0] == 200
        return False  # one of the first two is not closed yet

    until(answered)


@pytest.mark.parametrize(
    "beginning", [b"", b"POST /v1/", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_a_head_that_does_not_come_ends_the_connection(beginning: bytes, port: int) -> None:
    with connected(port) as client:
        client.sendall(beginning)
        if beginning.endswith(b"\r\n\r\n"):
            said = b""
            while not said.endswith(b"}"):
                said += client.recv(1000)
            client.sendall(b"GET")  # a second request that never comes
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(
    stream: bool, port: int, models: Models
) -> None:
    with connected(port) as client:
        client.sendall(request(max_tokens=200, temperature=0, stream=stream))
        until(partial(has, models, (1, 0)))
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    begun = time.monotonic()
    until(lambda: idle(models))
    assert time.monotonic() - begun < 1.5  # 200 tokens take 4 s
    assert post(port, TEXTS, {"model": "tiny", "prompt": "a", "max_tokens": 2})[0] == 200


@pytest.mark.usefixtures("slowly")
def test_a_full_queue_is_told_with_the_time_to_wait(port: int, models: Models) -> None:
    clients = [connected(port) for _ in range(4)]  # two are computed and two wait
    for number, client in enumerate(clients):
        client.sendall(request(max_tokens=100, temperature=0, stream=True))
        until(partial(has, models, (min(number + 1, 2), max(number - 1, 0))))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", TEXTS, json.dumps({"model": "tiny", "prompt": "a", "n": 2}))
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    assert (answer.status, error["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    connection.close()
    for client in clients:
        client.close()
    until(lambda: idle(models))


def test_a_time_limit_ends_a_request(model: ph.LanguageModel, slowly: None) -> None:
    with listening(models_of(model, timeout=0.2)) as port:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "temperature": 0}
        status, answer = post(port, TEXTS, body)
        assert (status, answer["error"]["code"]) == (503, "deadline_exceeded")
        with connected(port) as client:
            client.sendall(request(max_tokens=200, temperature=0, stream=True))
            said = b""
            while b"deadline_exceeded" not in said:
                more = client.recv(10_000)
                assert more, said
                said += more
        assert b"[DONE]" not in said


def test_what_a_client_does_not_read_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that writes without end: a model writes too little to fill the system's buffers."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.3)
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not ended:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            if (await _soon(receive)) == "http.disconnect":
                ended.append(True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(connections.configuration(app, "error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        with connected(listener.getsockname()[1]) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: bool(ended))
        server.should_exit = True
        thread.join(20)


async def _soon(receive: Any) -> str:
    try:
        async with asyncio.timeout(0.001):
            return str((await receive())["type"])
    except TimeoutError:
        return ""


@pytest.mark.usefixtures("slowly")
def test_requests_under_way_are_finished_when_the_server_ends(model: ph.LanguageModel) -> None:
    models = models_of(model)
    with listening(models) as port:
        client = connected(port)
        client.sendall(request(max_tokens=20, temperature=0, stream=True))
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    said = b""
    while more := client.recv(10_000):
        said += more
    client.close()
    assert b"[DONE]" in said


@pytest.mark.usefixtures("slowly")
def test_requests_that_do_not_finish_in_time_are_told(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GRACE_SECONDS", 0.2)
    models, said = models_of(model), [b"", b""]
    with listening(models) as port:
        clients = [connected(port) for _ in said]
        for number, client in enumerate(clients):
            client.sendall(request(max_tokens=400, temperature=0, stream=number == 0))
            until(partial(has, models, (number + 1, 0)))
    for number, client in enumerate(clients):
        while more := client.recv(10_000):
            said[number] += more
        client.close()
    assert said[0].startswith(b"HTTP/1.1 200")
    assert said[1].startswith(b"HTTP/1.1 503")
    for answer in said:
        assert b'"code":"shutting_down"' in answer
        assert b"[DONE]" not in answer


def test_work_of_an_encoder_is_finished_or_dropped_when_the_server_ends() -> None:
    async def run(worker: Worker) -> list[Any]:
        work = [asyncio.create_task(worker.run(partial(time.sleep, 0.3))) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert worker.waiting == 3
        await asyncio.to_thread(worker.close, 0.4)
        return await asyncio.gather(*work, worker.run(int), return_exceptions=True)

    first, second, *dropped = asyncio.run(run(Worker("test")))
    assert (first, second) == (None, None)
    assert [error.status for error in dropped] == [503, 503]
