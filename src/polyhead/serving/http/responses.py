"""Answers that end with their client: one that goes away cancels the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response

from polyhead.serving.http.errors import HEADERS, ApiError

_Made = TypeVar("_Made")
_Receive = Callable[[], Awaitable[Any]]


async def unless_gone(receive: _Receive, work: Awaitable[_Made]) -> _Made:
    """The result of work, which is cancelled if the client goes away.

    Args:
        receive: Of a request whose body has been read.
        work: What is awaited.

    Raises:
        ApiError: The client went away; nobody reads it.
    """
    making = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((making, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise ApiError(499, "the client went away")
        return making.result()
    finally:
        await _ended(making, leaving)


class Events(Response):
    """Server-sent events.

    Args:
        events: Each of them as bytes; closed at the end, also where the client went away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers=HEADERS | {"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _ended(sending, leaving)
            await self._events.aclose()

    async def _send(self, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs, and waits until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
