"""Processes that are ended while they work: ``polyhead serve``, ``route`` and ``batch``."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from served_tiny import post
from tiny import write_decoder

from polyhead.serving.http.route import Router, prefix_of

TEXTS = "/v1/completions"
ENDING = '"code":"shutting_down"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose texts may be long enough to be interrupted."""
    return write_decoder(tmp_path_factory.mktemp("tiny"), context=200_000)


def started(*line: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "polyhead.cli", *line]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def port_of(process: subprocess.Popen[str]) -> int:
    """The port that a server writes, once it listens."""
    assert process.stderr is not None
    told = []
    for said in process.stderr:
        told.append(said)
        if said.startswith("http://"):
            return int(said.split("/v1")[0].rpartition(":")[2])
    raise AssertionError(f"it ended before it listened: {told}")


@contextmanager
def listening(*line: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of ``serve`` or ``route`` and its port; killed at the end, if it has not ended."""
    process = started(*line)
    try:
        yield process, port_of(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with listening(
        "serve", str(folder), "--port", str(port), "--quiet", "--max-tokens", "900000"
    ) as found:
        yield found


def body(prompt: str = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, **more}


class Client:
    """A request that is under way on a connection of its own.

    Args:
        port: Of the server.
        options: Of the request.
        held: Bytes of its body that are sent later.
    """

    def __init__(self, port: int, options: dict[str, Any], held: int = 0) -> None:
        content = json.dumps(options).encode()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        head = f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        sent = len(content) - held
        self._socket.sendall(head.encode() + content[:sent])
        self._rest, self._said = content[sent:], b""

    def begun(self) -> Client:
        """Waits for the first events of a stream."""
        while self._said.count(b"data: ") < 3:
            self._said += self._more()
        return self

    def send_rest(self) -> None:
        self._socket.sendall(self._rest)

    def said(self) -> str:
        """All of the answer."""
        while more := self._more():
            self._said += more
        self._socket.close()
        return self._said.decode()

    def _more(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except ConnectionResetError:
            return b""


def whole(said: str) -> bool:
    """Whether an answer in chunks has its end."""
    return said.endswith("0\r\n\r\n")


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was waiting when the listener closed
        return False
    return False


def until_it_refuses(port: int) -> None:
    end = time.monotonic() + 20
    while not refuses(port):
        assert time.monotonic() < end, "it still takes connections"
        time.sleep(0.02)


def check_ending(process: subprocess.Popen[str], port: int) -> None:
    """After SIGTERM requests finish, others are refused, and a second one ends all at once."""
    late = Client(port, body(max_tokens=2), held=9)
    silent = Client(port, body(max_tokens=2), held=9)
    unstreamed = Client(port, body(max_tokens=150_000))
    short = Client(port, body(max_tokens=150, stream=True)).begun()
    long = Client(port, body(max_tokens=150_000, stream=True)).begun()
    process.send_signal(signal.SIGTERM)
    until_it_refuses(port)
    late.send_rest()
    answer = late.said()
    assert answer.startswith("HTTP/1.1 503 ")
    assert "retry-after: 10" in answer.lower()
    assert ENDING in answer
    answer = short.said()
    assert "data: [DONE]" in answer
    assert whole(answer)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    for client, status in ((long, 200), (unstreamed, 503), (silent, 503)):
        answer = client.said()
        assert answer.startswith(f"HTTP/1.1 {status} ")
        assert ENDING in answer
        assert "[DONE]" not in answer
        assert status == 503 or whole(answer)
    _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (0, "")


def test_sigterm_lets_requests_finish_and_a_second_one_ends_the_rest(folder: Path) -> None:
    with serving(folder) as (process, port):
        check_ending(process, port)


def test_a_router_lets_streams_finish_and_a_second_sigterm_ends_the_rest(folder: Path) -> None:
    with ExitStack() as stack:
        _, worker = stack.enter_context(serving(folder))
        process, port = stack.enter_context(
            listening("route", f"http://127.0.0.1:{worker}", "--port", "0")
        )
        check_ending(process, port)
        assert post(worker, TEXTS, body(max_tokens=3))[0] == 200


@pytest.mark.slow
def test_requests_that_have_no_time_to_finish_are_told(folder: Path) -> None:
    with serving(folder) as (process, port):
        clients = [
            Client(port, body(max_tokens=2), held=9),
            Client(port, body(max_tokens=190_000)),
            # Connections are taken in their order: once this one is served, the others are there.
            Client(port, body(max_tokens=190_000, stream=True)).begun(),
        ]
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        for client, status in zip(clients, (503, 503, 200), strict=True):
            answer = client.said()
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert ENDING in answer
        assert process.wait(20) == 0
        assert 24 < time.monotonic() - begun < 32


@pytest.mark.slow
def test_a_server_that_is_killed_breaks_streams_and_comes_back_on_its_port(folder: Path) -> None:
    with serving(folder) as (process, port):
        text = post(port, TEXTS, body(max_tokens=40))[1]["choices"][0]["text"]
        streamed = Client(port, body(max_tokens=150_000, stream=True)).begun()
        unstreamed = Client(port, body(max_tokens=150_000))
        process.kill()
        assert not whole(streamed.said())
        assert unstreamed.said() == ""
    with serving(folder, port) as (process, again):
        assert again == port
        assert post(port, TEXTS, body(max_tokens=40))[1]["choices"][0]["text"] == text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_harms_no_stream_of_the_others(folder: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(serving(folder)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for _, port in workers]
        _, port = stack.enter_context(listening("route", *urls, "--port", "0"))

        def asked(worker: int, **more: Any) -> dict[str, Any]:
            """A request that goes to a worker first."""
            for number in range(100):
                options = body(f"{number}", **more)
                first = Router(urls).order(prefix_of(json.dumps(options).encode()))[0]
                if first == urls[worker]:
                    return options
            raise AssertionError("all prompts go to one worker")

        broken = Client(port, asked(0, max_tokens=150_000, stream=True)).begun()
        moved = Client(port, asked(0, max_tokens=1_000))
        other = Client(port, asked(1, max_tokens=1_000, stream=True)).begun()
        workers[0][0].kill()
        answer = broken.said()
        assert whole(answer)
        assert '"code":"server_gone"' in answer
        assert "[DONE]" not in answer
        answer = other.said()
        assert "data: [DONE]" in answer
        assert moved.said().startswith("HTTP/1.1 200 ")  # nothing was sent of it: the next answers
        assert post(port, TEXTS, asked(0, max_tokens=3))[0] == 200
        workers[1][0].kill()
        status, told = post(port, TEXTS, asked(0, max_tokens=3))
        assert (status, told["error"]["message"]) == (503, "none of 2 servers answers")


@pytest.mark.slow
def test_a_batch_that_is_killed_loses_and_doubles_nothing(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "asked.jsonl", tmp_path / "asked.answers.jsonl"
    names = [f"n{number}" for number in range(150)]
    file.write_text("\n".join(
        json.dumps({"custom_id": name, "method": "POST", "url": TEXTS,
                    "body": body(name, max_tokens=200 + number)})
        for number, name in enumerate(names)
    ))  # fmt: skip
    line = "batch", str(file), "--model", str(folder), "--max-tokens", "4000"
    for least in (1, 40, 80):
        process, end = started(*line), time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b"\n") < least:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert out.read_bytes().count(b"\n") < len(names)
    process = started(*line)
    assert process.communicate(timeout=200)
    assert process.returncode == 0
    found = [json.loads(each) for each in out.read_text(encoding="utf-8").splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(names)
    assert {each["response"]["status_code"] for each in found} == {200}
    assert {each.name for each in tmp_path.iterdir()} == {file.name, out.name}
    again = tmp_path / "again.jsonl"
    process = started(*line, "--out", str(again))
    assert process.communicate(timeout=200)
    texts = [
        {each["custom_id"]: each["response"]["body"]["choices"] for each in lines}
        for lines in (found, map(json.loads, again.read_text(encoding="utf-8").splitlines()))
    ]
    assert texts[0] == texts[1]
