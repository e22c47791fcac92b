"""What each address of the API does with a request."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from polyhead.generation import SpeechToText, TextEncoder
from polyhead.serving.http.body import json_object, read_body
from polyhead.serving.http.errors import HEADERS, ApiError, refused
from polyhead.serving.http.jobs import job_of
from polyhead.serving.http.options import EMBEDDINGS, TRANSCRIPTIONS, read_options
from polyhead.serving.http.responses import Events, unless_gone
from polyhead.serving.http.served import Models
from polyhead.serving.http.texts import events, submitted, whole
from polyhead.serving.http.transcripts import MOST_BYTES as MOST_SOUND
from polyhead.serving.http.transcripts import transcription
from polyhead.serving.http.vectors import embeddings

EMBEDDINGS_PATH, TRANSCRIPTIONS_PATH = "/v1/embeddings", "/v1/audio/transcriptions"


class Api:
    """One method for each address.

    Args:
        served: The models.
    """

    def __init__(self, served: Models) -> None:
        self._models = served

    async def answer(self, path: str, body: dict[str, Any], caller: str = "") -> dict[str, Any]:
        """The whole answer to a request that is JSON, without HTTP.

        Raises:
            ApiError, PolyheadError, ValueError: What is wrong with it.
        """
        if path == EMBEDDINGS_PATH:
            options = read_options(EMBEDDINGS, body)
            found = self._models.find(options, TextEncoder, path)
            assert found.worker is not None  # an encoder's
            return await found.worker.run(partial(embeddings, found.model, found.name, options))
        job = await run_in_threadpool(job_of, self._models, path, body, caller)
        if job.stream:
            raise refused("stream", "a batch has no stream")
        return await whole(job, submitted(job))

    async def texts(self, request: Request) -> Response:
        body = json_object(await read_body(request))
        caller: str = request.state.caller
        job = await run_in_threadpool(job_of, self._models, request.url.path, body, caller)
        requests = submitted(job)
        if not job.stream:
            return _json(await unless_gone(request.receive, whole(job, requests)))
        return Events(events(job, requests))

    async def vectors(self, request: Request) -> Response:
        body = json_object(await read_body(request))
        return _json(await unless_gone(request.receive, self.answer(EMBEDDINGS_PATH, body)))

    async def transcript(self, request: Request) -> Response:
        sound, given = await _form(request)
        options = read_options(TRANSCRIPTIONS, given)
        found = self._models.find(options, SpeechToText, TRANSCRIPTIONS_PATH)
        assert found.worker is not None  # a speech model's
        work = partial(transcription, found.model, sound, options)
        made = await unless_gone(request.receive, found.worker.run(work))
        return PlainTextResponse(made, headers=HEADERS) if isinstance(made, str) else _json(made)

    def models(self, request: Request) -> Response:
        data = [each.as_json() for each in self._models.values()]
        return _json({"object": "list", "data": data})

    def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._models:
            raise ApiError(
                404, f"there is no model of this name: {', '.join(self._models)}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return _json(self._models[name].as_json())

    def health(self, request: Request) -> Response:
        return _json({"status": "ok"})


async def _form(request: Request) -> tuple[bytes, dict[str, Any]]:
    """The file and the other fields of a form."""
    content = await read_body(request, most=MOST_SOUND + (64 << 10))

    async def again() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    form = await Request(request.scope, again).form(
        max_files=1, max_fields=32, max_part_size=1 << 16
    )
    found: dict[str, Any] = {}
    for name in form:
        value: Any = form.getlist(name)
        name = name.removesuffix("[]")
        found[name] = value if name == "timestamp_granularities" else value[-1]
    file = found.pop("file", None)
    if file is None or isinstance(file, str):
        raise refused("file", "file is missing: give a recording", "missing_required_parameter")
    if isinstance(found.get("temperature"), str):
        found["temperature"] = _number("temperature", found["temperature"])
    if found.get("stream") in ("true", "false"):
        found["stream"] = found["stream"] == "true"
    return await file.read(), found


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise refused(name, f"{name} must be a number") from None


def _json(value: Any) -> Response:
    return JSONResponse(value, headers=HEADERS)
