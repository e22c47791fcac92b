"""OpenAI's API over the engine, as a Starlette application.

POST /v1/chat/completions      a chat
POST /v1/completions           a text goes on
POST /v1/embeddings            vectors of texts
POST /v1/audio/transcriptions  what is said in a recording
GET  /v1/models                the served models
GET  /health                   whether the server is up
GET  /metrics                  figures for Prometheus
GET  /                         a page of the load, which reads /load (load.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from polyhead.errors import PolyheadError
from polyhead.serving.http.api import EMBEDDINGS_PATH, TRANSCRIPTIONS_PATH, Api
from polyhead.serving.http.errors import HEADERS, ApiError, api_error
from polyhead.serving.http.guard import Guard
from polyhead.serving.http.jobs import CHAT_PATH, COMPLETIONS_PATH
from polyhead.serving.http.load import HEAD_PATH, LOAD_PATH, Load
from polyhead.serving.http.metrics import Metrics
from polyhead.serving.http.options import TABLES
from polyhead.serving.http.served import Models


def application(
    models: Models,
    *,
    keys: Collection[str] = (),
    page: str | None = None,
    show_heads: bool = False,
) -> Starlette:
    """The API.

    Args:
        models: What is served.
        keys: Keys of which every request must bring one; none: only this machine is served.
        page: The page of the load, as HTML; it is sent without a key, and asks for one. Default:
            none.
        show_heads: Whether a caller may see the text of a running request of its key, and what
            heads look at in it; default False.
    """
    api, load = Api(models), Load(models, page, show_heads=show_heads)
    paths = frozenset((*TABLES, "/v1/models", "/health", "/metrics", LOAD_PATH, HEAD_PATH))
    metrics = Metrics(models, paths)

    def figures(request: Request) -> Response:
        content, form = metrics.text()
        return Response(content, headers=HEADERS | {"Content-Type": form})

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        models.start()
        try:
            yield
        finally:
            await asyncio.to_thread(models.close, 0.0)

    return Starlette(
        routes=[
            Route(CHAT_PATH, api.texts, methods=["POST"]),
            Route(COMPLETIONS_PATH, api.texts, methods=["POST"]),
            Route(EMBEDDINGS_PATH, api.vectors, methods=["POST"]),
            Route(TRANSCRIPTIONS_PATH, api.transcript, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", figures),
            Route(LOAD_PATH, load.figures),
            Route(HEAD_PATH, load.head),
            *([] if page is None else [Route("/", load.page)]),
        ],
        middleware=[
            Middleware(metrics.watching),
            Middleware(Guard, keys=keys),
        ],
        exception_handlers={
            ApiError: _refused,
            HTTPException: _refused,
            ClientDisconnect: _refused,
            PolyheadError: _refused,
            ValueError: _refused,
            TypeError: _refused,
            Exception: _refused,
        },
        lifespan=running,
    )


async def _refused(request: Request, error: Exception) -> Response:
    # A function that is not async runs in a thread, which a server that ends does not wait for.
    if isinstance(error, HTTPException):
        words = {404: "there is no such address", 405: "this address takes another method"}
        detail = words.get(error.status_code, error.detail)
        return ApiError(error.status_code, detail).response()
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client went away").response()
    return api_error(error).response()
