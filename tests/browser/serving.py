"""The served page of tiny models: serving it, and reading what it shows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn

import polyhead as ph
from polyhead.viewer.server import application, configuration
from polyhead.viewer.studio import Studio

TOKEN = "a-token-that-nobody-guesses"
TEXT = "The animal slept; it was tired"
HANG = 120_000
"""Milliseconds after which a page, however slow the machine, is one that waits for ever."""
Visit = Callable[..., Any]


class Held:
    """Requests for a kind of answer of a layer, which get none until they are let go."""

    def __init__(self, page: Any, kind: str) -> None:
        self.routes: list[Any] = []
        self.goes: Callable[[int], bool] = lambda layer: False
        page.route(f"**/{kind}/*/*", self._meet)

    def answer(self, goes: Callable[[int], bool]) -> None:
        """From now on answers what is asked of these layers, and what was asked before."""
        self.goes = goes
        waiting, self.routes = self.routes, []
        for route in waiting:
            self._meet(route)

    def _meet(self, route: Any) -> None:
        layer = int(urlsplit(route.request.url).path.rpartition("/")[2])
        if self.goes(layer):
            route.continue_()
        else:
            self.routes.append(route)


def serving(studio: Studio, text: str) -> Iterator[str]:
    """Yields the address and serves there until it is asked for the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = configuration(application(studio, TOKEN, text), "error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(timeout=HANG / 1000)


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
