"""What a server does now, as JSON, for its page and for programs.

GET /load        every model: requests that run and wait, pages, tokens so far
GET /load/head   what one head of a running request looks at; only where the server shows heads
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from polyhead._utils.texts.labels import visible
from polyhead.models.parts import head_count
from polyhead.serving.http.errors import HEADERS, ApiError, refused
from polyhead.serving.http.served import Models, Served

LOAD_PATH, HEAD_PATH = "/load", "/load/head"
HEAD_SECONDS = 10.0
"""Seconds in which a request must take a step for its head to be seen."""


class Load:
    """The page and what it asks for.

    Args:
        models: The served models.
        page: The page, which says nothing of the server; None: none.
        show_heads: Whether a caller may see the text of a request of its key, and its heads.
    """

    def __init__(self, models: Models, page: str | None, *, show_heads: bool) -> None:
        self._models, self._page, self._show_heads = models, page, show_heads

    def page(self, request: Request) -> Response:
        headers = HEADERS | {
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(self._page, headers=headers)

    def figures(self, request: Request) -> Response:
        caller: str = request.state.caller
        models = [self._model(each, caller) for each in self._models.loaded]
        found = {"seconds": time.monotonic(), "shows_heads": self._show_heads, "models": models}
        return JSONResponse(found, headers=HEADERS)

    def _model(self, served: Served, caller: str) -> dict[str, Any]:
        engine = served.engine
        if engine is None:
            waiting = 0 if served.worker is None else served.worker.waiting
            return {"name": served.name, "waiting": waiting}
        stats, live = asdict(engine.stats), engine.requests
        transformer = served.model.transformer
        heads = [head_count(transformer, layer) for layer in range(len(transformer.layers))]
        requests = []
        for each in live:
            shown = asdict(each) | {"mine": each.share_with == caller}
            del shown["share_with"]
            requests.append(shown)
        return {
            "name": served.name,
            "adapters": engine.adapters.names,
            "heads": heads if self._show_heads else [],
            "max_rows": engine.max_rows,
            "page_size": engine.page_size,
            "used_pages": stats["used_tokens"] // engine.page_size,
            "free_pages": stats["free_tokens"] // engine.page_size,
            **stats,
            "requests": requests,
        }

    async def head(self, request: Request) -> Response:
        if not self._show_heads:
            raise ApiError(404, "heads are shown by a server that was started with --show-heads")
        name, caller = request.query_params.get("request", ""), request.state.caller
        layer, head = (_number(request, each) for each in ("layer", "head"))
        for served in self._models.loaded:
            engine = served.engine
            if engine is None or not any(
                each.id == name and each.share_with == caller for each in engine.requests
            ):
                continue
            asked = engine.heads.ask(name, layer, head)
            try:
                seen = await asyncio.wait_for(asyncio.wrap_future(asked), HEAD_SECONDS)
            except TimeoutError:
                break
            pieces = served.model.tokenizer.pieces(seen.ids)
            made = {"tokens": [visible(each) for each in pieces], "weights": seen.weights}
            return JSONResponse(made, headers=HEADERS)
        raise ApiError(404, "no request of this id writes now", param="request")


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not (text.isdecimal() and text.isascii() and len(text) < 6):
        raise refused(name, f"{name} must be a whole number, counted from 0")
    return int(text)
