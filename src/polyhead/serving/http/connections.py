"""Connections that are never waited for without end: uvicorn's protocol with three limits of time.

uvicorn waits as long as a client likes for the head of a request, and for a client that does not
read. Here a connection is closed that sends no whole head within ``HEAD_SECONDS``, or reads
nothing of what waits for it within ``UNREAD_SECONDS``. (Bodies: ``body.py``.)
"""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyhead.serving.http.served import Models

HEAD_SECONDS = 20.0
"""Seconds in which the head of a request must arrive, on a new connection or after an answer."""

UNREAD_SECONDS = 30.0
"""Seconds after which a client that does not read is disconnected."""

MOST_CONNECTIONS = 768
"""Connections at a time; further ones are closed at once."""

GRACE_SECONDS = 25.0
"""Seconds that requests have to finish after SIGTERM; the others then get an error."""

_LOST_SECONDS = 0.5
"""Seconds between two looks whether a process that has a part of a model is gone."""

TELLING_SECONDS = 3
"""Seconds that telling them may take."""


class Connection(H11Protocol):
    """A connection with limits of time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._waiting, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()
        if self.transport.is_closing() and self._stuck is None:
            # Closing sends what waits first, and would wait for its reader.
            self._stuck = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None and not self.transport.is_closing():
            self._stuck.cancel()
            self._stuck = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._stuck is None:
            self._stuck = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def _wait_for_head(self) -> None:
        """Starts the clock where a head is awaited, and stops it where one has come."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.abort)


def configuration(app: Any, log_level: str = "warning") -> uvicorn.Config:
    """uvicorn's configuration of the API."""
    return uvicorn.Config(
        app, log_level=log_level, access_log=False, http=Connection, ws="none", lifespan="on",
        h11_max_incomplete_event_size=16 << 10, timeout_keep_alive=15,
        timeout_graceful_shutdown=int(GRACE_SECONDS) + TELLING_SECONDS, server_header=False,
        proxy_headers=False, backlog=512,
    )  # fmt: skip


class Server(uvicorn.Server):
    """uvicorn's server, which ends the models' requests before it ends their connections.

    A first signal gives requests ``GRACE_SECONDS``; a second ends them at once, with an error to
    each client. The process then ends by itself, after SIGTERM with status 0.

    Args:
        app: The application.
        models: What it serves.
    """

    def __init__(self, app: Any, models: Models, log_level: str = "warning") -> None:
        super().__init__(configuration(app, log_level))
        self._models, self._hurried = models, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurried = True
        else:
            super().handle_exit(sig, frame)
        if sig == signal.SIGTERM:
            self._captured_signals.clear()  # uvicorn would raise it again at the end

    async def end_where_lost(self) -> None:
        """Ends as after a signal, once a model answers no more."""
        while self._models.lost is None:
            await asyncio.sleep(_LOST_SECONDS)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        await ending
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out

    async def _end_requests(self) -> None:
        ending = asyncio.create_task(asyncio.to_thread(self._models.close, GRACE_SECONDS))
        while not ending.done() and not self._hurried:
            await asyncio.wait([ending], timeout=0.1)
        if not ending.done():
            await asyncio.to_thread(self._models.close, 0.0)
            await asyncio.wait([asyncio.create_task(self._told())], timeout=TELLING_SECONDS)
            self.force_exit = True  # waits for nobody else
        await ending

    async def _told(self) -> None:
        while self.server_state.connections:
            await asyncio.sleep(0.05)
