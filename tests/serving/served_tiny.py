"""A tiny model behind the API: asked in this process, and over a socket."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient
from tiny import byte_tokenizer, decoder, encoder

pytest.importorskip("prometheus_client")

import polyhead as ph
from polyhead.serving.http.app import application
from polyhead.serving.http.connections import Server
from polyhead.serving.http.served import Models, Served

CONTEXT = 512


def tiny_decoder() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(context=CONTEXT), byte_tokenizer(), "tiny").eval()


def tiny_encoder() -> ph.TextEncoder:
    return ph.TextEncoder(encoder(), byte_tokenizer(), "tiny").eval()


def models_of(
    model: ph.LanguageModel, engine: dict[str, Any] | None = None, **settings: Any
) -> Models:
    return Models(
        Served.of("tiny", model, **{"max_tokens": 4096, **(engine or {})}),
        Served.of("vectors", tiny_encoder()),
        **settings,
    )


@contextmanager
def asking(models: Models, **guard: Any) -> Iterator[TestClient]:
    """A client in this process."""
    app = application(models, **guard)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


@contextmanager
def listening(models: Models, **guard: Any) -> Iterator[int]:
    """The port of a server on a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(application(models, **guard), models, "error")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            assert not thread.is_alive()


def post(port: int, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def events_of(text: str) -> list[Any]:
    """The objects of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
