"""OpenAI's batch format: a file of requests in, a file of answers out, without HTTP.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": …, "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, …}

An answer is written as soon as it is there, in one line. A batch that was interrupted goes on with
the requests whose answers are not in the file.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from polyhead._utils.checks import shown
from polyhead.checkpoints.json_file import parse_json
from polyhead.errors import InputError
from polyhead.serving.http.api import EMBEDDINGS_PATH, Api
from polyhead.serving.http.errors import ApiError, api_error
from polyhead.serving.http.jobs import CHAT_PATH, COMPLETIONS_PATH

MOST_LINE = 32 << 20
"""Bytes of a line at most."""
_AGAIN = 0.2
"""Seconds after which a request that found a full queue is tried again."""

PATHS = (CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH)


@dataclass(frozen=True)
class Line:
    """A request of a batch.

    Attributes:
        custom_id: Its name.
        path: The address that it is for.
        body: Its options.
    """

    custom_id: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """A checked file of requests; each is read again when its turn comes.

    Attributes:
        path: The file.
        places: Names of the requests, and where their lines begin.
        models: The models that they name.
    """

    path: Path
    places: dict[str, int]
    models: tuple[str, ...]

    def lines(self, done: set[str]) -> Iterator[Line]:
        """The requests that are not among ``done``."""
        with self.path.open("rb") as file:
            for name, place in self.places.items():
                if name not in done:
                    file.seek(place)
                    yield _line(file.readline(), f"{self.path}: request {name}")


def read_batch(path: Path) -> Batch:
    """Checks a file of requests.

    Raises:
        InputError: It cannot be read, a line is no request, or two have one name; by the number of
            the line.
    """
    places: dict[str, int] = {}
    models: dict[str, None] = {}
    try:
        with path.open("rb") as file:
            place = 0
            for number, content in enumerate(_lines(file, path), 1):
                if content.strip():
                    line = _line(content, f"{path}, line {number}")
                    if line.custom_id in places:
                        raise InputError(
                            f"{path}, line {number}: custom_id {shown(line.custom_id)} stands twice"
                        )
                    places[line.custom_id] = place
                    if isinstance(model := line.body.get("model"), str):
                        models[model] = None
                place += len(content)
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {(error.strerror or '').lower()}") from error
    if not places:
        raise InputError(f"{path} holds no requests")
    return Batch(path, places, tuple(models))


def answered(out: Path, batch: Batch) -> set[str]:
    """Names of the requests whose answers are in a file; an unfinished last line is cut off.

    Raises:
        InputError: It is no file of answers, or one to other requests.
    """
    if not out.exists():
        return set()
    found: set[str] = set()
    with out.open("r+b") as file:
        place = 0
        for number, content in enumerate(_lines(file, out), 1):
            if not content.endswith(b"\n"):
                file.truncate(place)  # written when the power went
                break
            place += len(content)
            try:
                name = parse_json(content.decode("utf-8"))["custom_id"]
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{out}, line {number} is no answer of a batch") from error
            if name not in batch.places:
                raise InputError(
                    f"{out}, line {number} answers {shown(name)}, which {batch.path} does not ask: "
                    "name another file"
                )
            found.add(name)
    return found


async def run_batch(
    api: Api,
    batch: Batch,
    out: Path,
    done: set[str],
    *,
    model: str | None = None,
    at_once: int = 48,
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Answers the requests that are not done; returns how many of them were refused.

    Args:
        api: Answers each.
        batch: The requests.
        out: The file that answers are appended to.
        done: Names of the requests that are answered.
        model: Answers all of them; None: the model that each names.
        at_once: Requests that are under way at a time.
        advance: Called with the number of answers after each.
    """
    refused, count = 0, len(done)
    under_way: set[asyncio.Task[dict[str, Any]]] = set()
    lines = batch.lines(done)
    with out.open("ab") as file:
        try:
            while True:
                for line in lines:
                    under_way.add(asyncio.create_task(_answer(api, line, model)))
                    if len(under_way) >= at_once:
                        break
                if not under_way:
                    return refused
                ended, under_way = await asyncio.wait(
                    under_way, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    answer = task.result()
                    file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                    refused += answer["response"]["status_code"] != 200
                    count += 1
                    advance(count)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _answer(api: Api, line: Line, model: str | None) -> dict[str, Any]:
    body = line.body if model is None else line.body | {"model": model}
    try:
        status, answer = 200, await _patiently(api, line.path, body)
    except Exception as error:
        failed = api_error(error)
        if failed is not error and failed.status == 500:
            raise  # a bug, which other requests have too
        status, answer = failed.status, failed.body()
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {
            "status_code": status,
            "request_id": f"req_{secrets.token_hex(12)}",
            "body": answer,
        },
        "error": None,
    }


async def _patiently(api: Api, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, as soon as there is room for the request."""
    while True:
        try:
            return await api.answer(path, body)
        except ApiError as error:
            if error.status != 429:
                raise
        await asyncio.sleep(_AGAIN)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while content := file.readline(MOST_LINE):
        if len(content) == MOST_LINE:
            raise InputError(f"{path} has a line of more than {MOST_LINE >> 20} MiB")
        yield content


def _line(content: bytes, where: str) -> Line:
    try:
        found = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{where} must be an object: got {shown(found)}")
    name, method, path, body = (found.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: custom_id must be a text: got {shown(name)}")
    if method != "POST":
        raise InputError(f"{where}: method must be 'POST': got {shown(method)}")
    if path not in PATHS:
        raise InputError(f"{where}: url must be one of {', '.join(PATHS)}: got {shown(path)}")
    if not isinstance(body, dict):
        raise InputError(f"{where}: body must be an object: got {shown(body)}")
    return Line(name, path, body)
