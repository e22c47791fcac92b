"""The studio as a local web page: Starlette behind an address that only this user knows.

    /TOKEN/                                      the page
    /TOKEN/look           POST text              runs the model, answers with the tokens; whoever
                                                 closes the connection cancels the run
    /TOKEN/progress                              layers done of the latest run
    /TOKEN/thumbnails/LOOK/LAYER                 bytes [H, P, P], 255 √weight
    /TOKEN/statistics/LOOK/LAYER                 a number per head and statistic
    /TOKEN/notable/LOOK                          the heads that do something known
    /TOKEN/region/LOOK/LAYER/HEAD                float32 [rows, columns] of a rectangle
    /TOKEN/row/LOOK/LAYER/HEAD/QUERY             float32 [T]
    /TOKEN/next/LOOK      POST heads             the next tokens with heads ablated
    /TOKEN/page/LOOK                             the self-contained page

Whoever does not know the token gets 404 everywhere; whoever comes by another host name than the
loopback's (a page that rebinds its name) gets 400. The page may load nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from polyhead.checkpoints.json_file import parse_json
from polyhead.errors import InputError, PolyheadError, shortened
from polyhead.inspection.model import HeadsByLayer
from polyhead.inspection.page import script_json, texts_json
from polyhead.inspection.progress import Run
from polyhead.inspection.studio import Look, Studio, as_json, shown_tokens

MOST_BYTES = 32 << 20
"""Longest request: a text of 10 MB, escaped."""

_ASK_AGAIN = 0.2
"""Seconds after which the server asks whether a look's client is still there."""

_SCRIPTS = (
    ("page", "theme"), ("page", "dom"), ("page", "texts"), ("page", "ramp"), ("page", "lines"),
    ("served", "api"),
    ("served", "grid"), ("served", "map"), ("served", "tokens"), ("served", "export"),
    ("served", "main"),
)  # fmt: skip
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def application(
    studio: Studio, token: str, text: str = "", language: str | None = None
) -> Starlette:
    """The web application.

    Args:
        studio: What it shows.
        token: The first part of every address.
        text: What the page looks at to begin with.
        language: Of its texts, "en" or "zh"; None: the browser's.
    """
    handlers = _Handlers(studio, text, language)
    known = {
        f"{name}.{kind}": (folder, kind)
        for folder, name, kind in (
            *((folder, name, "js") for folder, name in _SCRIPTS),
            ("page", "page", "css"),
            ("served", "served", "css"),
        )
    }

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in known:
            raise HTTPException(404)
        folder, kind = known[name]
        media = {"js": "text/javascript", "css": "text/css"}[kind]
        return Response(_asset(folder, name), media_type=media, headers=_HEADERS)

    routes = [
        Route("/", handlers.page),
        Route("/asset/{name}", asset),
        Route("/look", handlers.look, methods=["POST"]),
        Route("/progress", handlers.progress),
        Route("/thumbnails/{look:int}/{layer:int}", handlers.thumbnails),
        Route("/statistics/{look:int}/{layer:int}", handlers.statistics),
        Route("/notable/{look:int}", handlers.notable),
        Route("/region/{look:int}/{layer:int}/{head:int}", handlers.region),
        Route("/row/{look:int}/{layer:int}/{head:int}/{query:int}", handlers.row),
        Route("/next/{look:int}", handlers.next_tokens, methods=["POST"]),
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


class _OnlyWithToken:
    """Answers 404 to every address that does not begin with the token."""

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = scope["path"].split("/")[1].encode()
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
        content = {"text": self.text, "models": self.studio.names}
        scripts = "\n".join(
            f'<script src="asset/{name}.js" defer></script>' for _, name in _SCRIPTS
        )
        html = _asset("served", "served.html")
        html = html.replace("{{scripts}}", scripts)
        html = html.replace("{{texts}}", texts_json(self.language, "served"))
        html = html.replace("{{begin}}", script_json(content))
        return Response(html, media_type="text/html", headers=_HEADERS)

    async def look(self, request: Request) -> Response:
        """Runs the model; whoever goes away stops it."""
        asked = await _json_of(request)
        run = Run()
        arguments = _text_of(asked, "text"), _text_of(asked, "model"), _heads_of(asked), run
        looking = asyncio.create_task(run_in_threadpool(self.studio.look, *arguments))
        try:
            while not (await asyncio.wait([looking], timeout=_ASK_AGAIN))[0]:
                if await request.is_disconnected():
                    run.stop()
        finally:
            run.stop()
        return JSONResponse(as_json(await looking), headers=_HEADERS)

    def progress(self, request: Request) -> Response:
        run = self.studio.run
        return JSONResponse({"done": run.done, "layers": run.layers}, headers=_HEADERS)

    async def next_tokens(self, request: Request) -> Response:
        heads = _heads_of(await _json_of(request))
        found = await run_in_threadpool(self.studio.next_tokens, request.path_params["look"], heads)
        return JSONResponse({"next": shown_tokens(found)}, headers=_HEADERS)

    def thumbnails(self, request: Request) -> Response:
        pixels = _number(request, "pixels", 48, least=1, most=128)
        return _binary(self._look(request).thumbnails(request.path_params["layer"], pixels))

    async def statistics(self, request: Request) -> Response:
        # All heads are measured while a person looks at some, and those come first.
        work = partial(self._look(request).statistics, request.path_params["layer"])
        found = await asyncio.get_running_loop().run_in_executor(self.patient, work)
        return JSONResponse(found, headers=_HEADERS)

    async def notable(self, request: Request) -> Response:
        work = self._look(request).notable
        found = await asyncio.get_running_loop().run_in_executor(self.patient, work)
        return JSONResponse(found, headers=_HEADERS)

    def region(self, request: Request) -> Response:
        look, place = self._look(request), request.path_params
        most = len(look.tokens.ids)
        ends = [_number(request, name, 0, least=0, most=most) for name in ("q0", "k0")]
        stops = [_number(request, name, most, least=1, most=most) for name in ("q1", "k1")]
        (q_range, k_range) = (slice(a, b) for a, b in zip(ends, stops, strict=True))
        pixels = _number(request, "pixels", 256, least=1, most=1024)
        found = look.region(place["layer"], place["head"], q_range, k_range, pixels)
        return _binary(found)

    def row(self, request: Request) -> Response:
        place = request.path_params
        return _binary(self._look(request).row(place["layer"], place["head"], place["query"]))

    def whole_page(self, request: Request) -> Response:
        html = self._look(request).page()
        name = 'attachment; filename="polyhead-look.html"'
        headers = _HEADERS | {"Content-Disposition": name}
        return Response(html, media_type="text/html", headers=headers)

    def _look(self, request: Request) -> Look:
        return self.studio[request.path_params["look"]]


async def _json_of(request: Request) -> dict[str, Any]:
    """The object in a request's body, refused where it is too long or something else."""
    too_long = HTTPException(413, f"a request holds at most {MOST_BYTES >> 20} MiB")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 12 or int(stated) > MOST_BYTES:
        raise too_long  # before any of it is read
    chunks, length = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        length += len(chunk)
        if length > MOST_BYTES:
            raise too_long
    try:
        asked = parse_json(b"".join(chunks).decode("utf-8"))
    except ValueError as error:
        raise HTTPException(400, "the request is not JSON") from error
    if not isinstance(asked, dict):
        raise HTTPException(400, "the request is not a JSON object")
    return asked


def _text_of(asked: dict[str, Any], name: str) -> str:
    text = asked.get(name, "")
    if not isinstance(text, str):
        raise InputError(f"{name} must be a text: got {shortened(text)}")
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


def _binary(values: npt.NDArray[Any]) -> Response:
    """Numbers as little-endian bytes, their shape in a header."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    headers = _HEADERS | {"X-Shape": ",".join(map(str, values.shape))}
    return Response(little.tobytes(), media_type="application/octet-stream", headers=headers)


def _refused(request: Request, error: Exception) -> Response:
    """What was wrong with a request, as a sentence."""
    return JSONResponse({"error": str(error)}, status_code=400, headers=_HEADERS)


def _give_way() -> None:
    """This thread, and those it starts, run when no others want to."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def _asset(folder: str, name: str) -> str:
    return (resources.files(__package__) / folder / name).read_text(encoding="utf-8")


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(24)
