"""Requests to the local server: what is in their bodies and addresses. No answer may be a 500."""

from __future__ import annotations

import asyncio
import json
import re
from random import Random
from typing import Any

import torch

from fuzz import mutation
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.errors import InputError
from polyhead.generation import LanguageModel
from polyhead.models import Transformer
from polyhead.viewer.server import application
from polyhead.viewer.studio import Studio

TOKEN = "token"
LOOK = {"text": "The animal", "model": "tiny", "heads": [[0, 1], [1, 0]]}
WRITE = {"max_new_tokens": 2, "temperature": 0.5, "top_k": 3, "seed": 1, "heads": [[0, 1]]}
ADDRESSES = (
    *("look", "look", "look", "next/1", "next/1", "progress", "thumbnails/1/0", "statistics/1/1"),
    *("region/1/0/1?q0=0&q1=5&k0=0&k1=5&pixels=4", "row/1/0/1/3", "column/1/0/1/3", "pair/1/3/1"),
    *(
        "product/1/0/1/3/1",
        "way/1/3",
        "write/1",
        "page/1",
        "page/1?beside=1",
        "thumbnails/1/1?first=hidden",
        "",
    ),
)
TARGETS = ("*", "", "localhost:443", "http://localhost/", "/", "//", TOKEN, f"{TOKEN}/", "\0", "/x")
PIECES = ("0", "-1", "99", "9" * 30, "9" * 5_000, "1e3", "/", "..", "%00", "?", "&", "=", "q0=5")
NUMBERS = ("0", "1", "2", "7", "-1", "99", "9" * 30, "9" * 5_000, "1e3", "nan", "x", "", "\u0663")
app: Any = None


def prepare() -> None:
    global app
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    from polyhead.checkpoints import Tokenizer

    backend = Backend(models.WordLevel({chr(i): i for i in range(32, 127)}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    layer = LayerConfig(AttentionConfig(2, 2, 8), FeedForwardConfig(16))
    torch.manual_seed(0)
    config = TransformerConfig("decoder", 128, 16, 32, (layer, layer))
    model = LanguageModel(Transformer(config), Tokenizer(backend), "tiny").eval()
    app = application(Studio(lambda name: model, ["tiny"]), TOKEN)
    asyncio.run(answer("look", json.dumps(LOOK).encode()))


async def answer(address: str, body: bytes) -> tuple[int, bytes]:
    """What the application says to a request, without a network.

    Args:
        address: Behind the token, or a whole target that begins with ``=``.
        body: What is sent.
    """
    path, _, query = address.partition("?")
    path = path[1:] if path.startswith("=") else f"/{TOKEN}/{path}"
    parts = [body[i : i + 100] for i in range(0, len(body), 100)] or [b""]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    posts = address.startswith(("look", "next", "write"))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST" if posts else "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "root_path": "",
        "query_string": query.encode("utf-8", "replace"),
        "headers": [(b"host", b"127.0.0.1"), (b"content-length", str(len(body)).encode())],
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def case(random: Random) -> None:
    address = random.choice(ADDRESSES)
    kind = random.random()
    if kind < 0.2:
        address = mutation.text(random, address, PIECES)
    elif kind < 0.5 and (numbers := [*re.finditer("[0-9]+", address)]):
        at = random.choice(numbers)
        address = address[: at.start()] + random.choice(NUMBERS) + address[at.end() :]
    elif kind < 0.55:
        address = "=" + mutation.text(random, random.choice(TARGETS), PIECES)
    body = mutation.json_text(random, WRITE if address.startswith("write") else LOOK)
    status, said = asyncio.run(answer(address, body))
    assert status < 500, said
    if status >= 400:
        raise InputError(said.decode() if b" " in said else f"status {status}")
