"""The body of a request as a JSON object: of bounded length, within bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from polyhead.checkpoints.json_file import parse_json
from polyhead.serving.http.errors import server_ending

MOST_BYTES = 32 << 20
"""Longest body: a text of 10 MB as JSON."""

BODY_SECONDS = 30.0
"""Seconds in which a body must arrive."""


async def read_body(
    request: Request, *, most: int = MOST_BYTES, seconds: float | None = None
) -> bytes:
    """The body.

    Args:
        most: Bytes above which it is refused before it is read.
        seconds: Time in which it must arrive; None: ``BODY_SECONDS``.

    Raises:
        HTTPException: 413 for too many bytes, 408 for too much time.
        ApiError: 503 where the server ends.
    """
    too_long = HTTPException(413, f"a request holds at most {most >> 20} MiB")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 12 or int(stated) > most:
        raise too_long  # before any of it is read
    chunks, length = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS if seconds is None else seconds):
            async for chunk in request.stream():
                chunks.append(chunk)
                length += len(chunk)
                if length > most:
                    raise too_long
    except TimeoutError:
        raise HTTPException(408, "the request took too long to arrive") from None
    except asyncio.CancelledError:  # uvicorn cancels a request only where it ends
        raise server_ending() from None
    return b"".join(chunks)


def json_object(content: bytes) -> dict[str, Any]:
    """The JSON object that a body holds.

    Raises:
        HTTPException: 400, with what is wrong.
    """
    try:
        found = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise HTTPException(400, f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise HTTPException(400, "the request is not a JSON object")
    return found
