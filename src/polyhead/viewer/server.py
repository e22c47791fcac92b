"""The studio as a local web page: Starlette behind an address that only this user knows.

    /TOKEN/                                      the page
    /TOKEN/look           POST text              runs the model, answers with the tokens; closing
                                                 the connection cancels the run
    /TOKEN/progress                              layers done of the latest run
    /TOKEN/thumbnails/LOOK/LAYER                 bytes [H, P, P], 255 √weight
    /TOKEN/statistics/LOOK/LAYER                 a number per head and statistic
    /TOKEN/notable/LOOK                          the weights and heads that are worth seeing
    /TOKEN/region/LOOK/LAYER/HEAD                float32 [rows, columns] of a rectangle
    /TOKEN/row/LOOK/LAYER/HEAD/QUERY             float32 [S]
    /TOKEN/column/LOOK/LAYER/HEAD/KEY            float32 [T]
    /TOKEN/pair/LOOK/QUERY/KEY                   float32, a weight for every head
    /TOKEN/product/LOOK/LAYER/HEAD/QUERY/KEY     float32 q, k, raw scores, scores behind each other
    /TOKEN/way/LOOK/TOKEN                         what each layer adds, the guesses after each
    /TOKEN/next/LOOK      POST heads             the next token with heads ablated
    /TOKEN/write/LOOK     POST options           what a decoder writes behind the text
    /TOKEN/page/LOOK                             the self-contained page

Requests without the token get 404 everywhere; requests for another host name than the loopback's
(DNS rebinding) get 400. The page may load nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from polyhead.errors import InputError, PolyheadError, shortened
from polyhead.models.parts import HeadsByLayer
from polyhead.serving.http.body import BODY_SECONDS, MOST_BYTES, json_object, read_body
from polyhead.viewer.look_page import page_data
from polyhead.viewer.looks import Look
from polyhead.viewer.page import content_policy, render, served
from polyhead.viewer.progress import ModelRun
from polyhead.viewer.studio import Studio

_Made = TypeVar("_Made")

MOST_CONNECTIONS = 64
"""Connections at a time, above which requests get 503; a browser keeps six for a page."""

_ASK_AGAIN = 0.2
"""Seconds after which the server asks whether a look's client is still there."""

_ABOVE_THE_PAGE = "frame-ancestors 'none'"
"""The directive that only a header can set."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"default-src 'none'; {_ABOVE_THE_PAGE}",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def application(
    studio: Studio, token: str, text: str = "", language: str | None = None
) -> Starlette:
    """The web application.

    Args:
        token: The first part of every address.
        text: What the page looks at to begin with.
        language: Language of its texts, "en" or "zh"; None: the browser's.
    """
    handlers = _Handlers(studio, text, language)
    routes = [
        Route("/", handlers.page),
        Route("/look", handlers.look, methods=["POST"]),
        Route("/progress", handlers.progress),
        Route("/thumbnails/{look:int}/{layer:int}", handlers.thumbnails),
        Route("/statistics/{look:int}/{layer:int}", handlers.statistics),
        Route("/notable/{look:int}", handlers.notable),
        Route("/region/{look:int}/{layer:int}/{head:int}", handlers.region),
        Route("/row/{look:int}/{layer:int}/{head:int}/{query:int}", handlers.row),
        Route("/column/{look:int}/{layer:int}/{head:int}/{key:int}", handlers.column),
        Route("/pair/{look:int}/{query:int}/{key:int}", handlers.pair),
        Route("/product/{look:int}/{layer:int}/{head:int}/{query:int}/{key:int}", handlers.product),
        Route("/way/{look:int}/{token:int}", handlers.way),
        Route("/next/{look:int}", handlers.next_token, methods=["POST"]),
        Route("/write/{look:int}", handlers.write, methods=["POST"]),
        Route("/page/{look:int}", handlers.whole_page),
    ]
    return Starlette(
        routes=[Mount("/{token}", routes=routes)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(_OnlyWithToken, token=token),
            Middleware(GZipMiddleware, minimum_size=1024, compresslevel=1),
        ],
        exception_handlers={PolyheadError: _refused, ValueError: _refused, LookupError: _refused},
    )


def configuration(app: Starlette, log_level: str = "warning") -> uvicorn.Config:
    """uvicorn's configuration for this machine alone."""
    return uvicorn.Config(
        app, log_level=log_level, access_log=False, http="h11", ws="none", lifespan="off",
        limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=16 << 10,
        timeout_keep_alive=5,
    )  # fmt: skip


class _OnlyWithToken:
    """Answers 404 to every address that does not begin with the token."""

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            # Of "*", "localhost:443" and other targets without a slash no part is the token.
            given = scope["path"].partition("/")[2].partition("/")[0].encode()
            if not secrets.compare_digest(given, self.token):
                await Response(status_code=404, headers=_HEADERS)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class _Handlers:
    """One method per address; Starlette runs a plain ``def`` in a thread."""

    def __init__(self, studio: Studio, text: str, language: str | None) -> None:
        self.studio, self.text, self.language = studio, text, language
        self.patient = ThreadPoolExecutor(1, "statistics", initializer=_give_way)

    def page(self, request: Request) -> Response:
        html = served({"text": self.text, "models": self.studio.names}, self.language)
        allowed = f"{content_policy(connect=True)}; {_ABOVE_THE_PAGE}"
        headers = _HEADERS | {"Content-Security-Policy": allowed}
        return Response(html, media_type="text/html", headers=headers)

    async def look(self, request: Request) -> Response:
        """Runs the model; a client that disconnects stops the run."""
        asked = await _json_of(request)
        run = ModelRun()
        arguments = _text_of(asked, "text"), _text_of(asked, "model"), _heads_of(asked), run
        found = await _unless_gone(request, run, partial(self.studio.look, *arguments))
        header = await run_in_threadpool(found.header)
        return JSONResponse(header, headers=_HEADERS)

    def progress(self, request: Request) -> Response:
        run = self.studio.run
        return JSONResponse({"done": run.done, "layers": run.layers}, headers=_HEADERS)

    async def next_token(self, request: Request) -> Response:
        heads, number = _heads_of(await _json_of(request)), request.path_params["look"]
        found = await run_in_threadpool(self.studio.next_token, number, heads)
        pieces = self.studio[number].tokenizer.pieces
        said = None if found is None else found.as_json(pieces)
        return JSONResponse({"next": said}, headers=_HEADERS)

    async def write(self, request: Request) -> Response:
        """Continues a text; a client that disconnects stops it."""
        asked = await _json_of(request)
        heads, run = _heads_of(asked), ModelRun()
        options = {name: value for name, value in asked.items() if name != "heads"}
        number = request.path_params["look"]
        text = await _unless_gone(
            request, run, partial(self.studio.write, number, heads, options, run)
        )
        return JSONResponse({"text": text}, headers=_HEADERS)

    def thumbnails(self, request: Request) -> Response:
        pixels = _number(request, "pixels", 48, least=1, most=128)
        first = request.query_params.get("first") != "hidden"
        layer = request.path_params["layer"]
        return _binary(self._look(request).thumbnails(layer, pixels, first))

    async def statistics(self, request: Request) -> Response:
        # Measuring all heads runs with low priority beside requests for single heads.
        work = partial(self._look(request).statistics, request.path_params["layer"])
        found = await asyncio.get_running_loop().run_in_executor(self.patient, work)
        return JSONResponse(found, headers=_HEADERS)

    async def notable(self, request: Request) -> Response:
        work = partial(self.studio.notable, request.path_params["look"])
        found = await asyncio.get_running_loop().run_in_executor(self.patient, work)
        return JSONResponse(found, headers=_HEADERS)

    def region(self, request: Request) -> Response:
        look, place = self._look(request), request.path_params
        call = look.layers[place["layer"]].view.call
        sizes = {"q": call.q_tokens.length, "k": call.k_tokens.length}
        q_range, k_range = (
            slice(
                _number(request, f"{side}0", 0, least=0, most=most),
                _number(request, f"{side}1", most, least=1, most=most),
            )
            for side, most in sizes.items()
        )
        pixels = _number(request, "pixels", 256, least=1, most=1024)
        found = look.region(place["layer"], place["head"], q_range, k_range, pixels)
        return _binary(found)

    def row(self, request: Request) -> Response:
        place = request.path_params
        return _binary(self._look(request).row(place["layer"], place["head"], place["query"]))

    def column(self, request: Request) -> Response:
        place = request.path_params
        return _binary(self._look(request).column(place["layer"], place["head"], place["key"]))

    def pair(self, request: Request) -> Response:
        place = request.path_params
        return _binary(self._look(request).pair(place["query"], place["key"]))

    def product(self, request: Request) -> Response:
        place = [request.path_params[name] for name in ("layer", "head", "query", "key")]
        found = self._look(request).product(*place)
        parts = (found.q, found.k, found.raw, found.scores)
        return _binary(torch.cat(parts).cpu().numpy(), tuple(map(len, parts)))

    def way(self, request: Request) -> Response:
        found = self._look(request).way(request.path_params["token"])
        return JSONResponse(found, headers=_HEADERS)

    def whole_page(self, request: Request) -> Response:
        beside = request.query_params.get("beside")
        looks = [self._look(request)]
        if beside is not None:
            looks.append(self.studio[_number(request, "beside", 0, least=0, most=1 << 31)])
        for look in looks:
            self.studio.notable(look.number)  # no other text runs meanwhile
        html = render(*(page_data(look, language=self.language) for look in looks))
        name = 'attachment; filename="polyhead-look.html"'
        headers = _HEADERS | {"Content-Disposition": name}
        return Response(html, media_type="text/html", headers=headers)

    def _look(self, request: Request) -> Look:
        return self.studio[request.path_params["look"]]


async def _unless_gone(request: Request, run: ModelRun, work: Callable[[], _Made]) -> _Made:
    """The result of work in a thread; a client that disconnects stops it."""
    making = asyncio.create_task(run_in_threadpool(work))
    try:
        while not (await asyncio.wait([making], timeout=_ASK_AGAIN))[0]:
            if await request.is_disconnected():
                run.stop()
    finally:
        run.stop()
    return await making


async def _json_of(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body, refused if it is too long or too slow."""
    return json_object(await read_body(request, most=MOST_BYTES, seconds=BODY_SECONDS))


def _text_of(asked: dict[str, Any], name: str) -> str:
    text = asked.get(name, "")
    if not isinstance(text, str):
        raise InputError(f"{name} must be a string: got {shortened(text)}")
    return text


def _heads_of(asked: dict[str, Any]) -> HeadsByLayer:
    """``{"heads": [[3, 1], [7, 4]]}`` as ``{3: [1], 7: [4]}``."""
    pairs = asked.get("heads", [])
    found: dict[int, list[int]] = {}
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not (isinstance(pair, list) and [type(part) for part in pair] == [int, int]):
            raise InputError(
                f"heads must be a list of pairs [layer, head] of whole numbers: got "
                f"{shortened(pairs)}"
            )
        found.setdefault(pair[0], []).append(pair[1])
    return found


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
        raise ValueError(
            f"{name} must be a whole number from {least} to {most}: got {shortened(text)}"
        )
    return int(text)


def _binary(values: npt.NDArray[Any], shape: tuple[int, ...] | None = None) -> Response:
    """Numbers as little-endian bytes; their shape, or the lengths of their parts, in a header."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    headers = _HEADERS | {"X-Shape": ",".join(map(str, shape or values.shape))}
    return Response(little.tobytes(), media_type="application/octet-stream", headers=headers)


def _refused(request: Request, error: Exception) -> Response:
    """The error of a request, as a sentence."""
    return JSONResponse({"error": str(error)}, status_code=400, headers=_HEADERS)


def _give_way() -> None:
    """Gives this thread, and those it starts, low priority."""
    if sys.platform == "linux":  # elsewhere priorities are per process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(24)
