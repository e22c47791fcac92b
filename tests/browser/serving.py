"""The served page of tiny models: serving it, and reading what it shows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import uvicorn

import polyhead as ph
from polyhead.viewer.server import application, configuration
from polyhead.viewer.studio import Studio

TOKEN = "a-token-that-nobody-guesses"
TEXT = "The animal slept; it was tired"
Visit = Callable[..., Any]


def serving(studio: Studio, text: str) -> Iterator[str]:
    """Yields the address and serves there until it is asked for the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = configuration(application(studio, TOKEN, text), "error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(timeout=30)


def text_of(page: Any, name: str) -> str:
    return str(page.get_by_test_id(name).inner_text())


def weights_of(model: ph.LanguageModel, text: str) -> tuple[torch.Tensor, ph.Probe]:
    """What the page must show: ``[layers, heads, T, T]``, and the run that it comes from."""
    ids = torch.tensor([model.tokenizer.encode(text)])
    with ph.probe(model) as seen, torch.no_grad():
        model(ids)
    return torch.stack([view.rows()[0] for view in seen]), seen


def open_head(page: Any, name: str) -> None:
    """Opens a head and waits until all of it is shown."""
    layer, head = name.split(".")
    page.evaluate(f"polyhead.select({layer}, {head})")


def map_of(page: Any, number: int = 0) -> torch.Tensor:
    """What the large map shows, ``[rows, columns]``; 1 is the one beside."""
    found = page.evaluate(
        "(n) => { const m = polyhead.maps[n].map; return [m.rows, m.columns, [...m.values]]; }",
        number,
    )
    rows, columns, values = found
    return torch.tensor(values).view(rows, columns)
