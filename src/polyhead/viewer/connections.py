"""How long connections of the local server may last, and how many there may be.

Any process of this machine can open the port, even without knowing the page's address. So
connections that send nothing or half a request are closed, and those above a limit too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 64
"""Most connections at a time; a browser keeps six for a page."""
MOST_HEADER_BYTES = 16 << 10
HEADER_SECONDS, BODY_SECONDS = 10.0, 30.0
"""Seconds in which the headers of a request, and then its body, must arrive."""
_LOOK_AGAIN = 1.0


class Impatient(H11Protocol):
    """HTTP/1.1 that waits only so long for the rest of a request."""

    _watch: asyncio.TimerHandle | None = None
    _waiting: tuple[Any, ...] = ()
    _since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(error)

    def _look(self) -> None:
        """Closes a connection that has waited too long in one state."""
        cycle = self.cycle
        served = cycle is None or cycle.response_complete
        state, now = (self.conn.their_state, id(cycle), served), time.monotonic()
        if state != self._waiting:
            self._waiting, self._since = state, now
        limit = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(self.conn.their_state)
        if limit is not None and now - self._since >= limit:
            self.transport.abort()
            return
        self._watch = self.loop.call_later(_LOOK_AGAIN, self._look)


def configuration(application: Any, log_level: str = "warning") -> uvicorn.Config:
    """The configuration of the local server for an application."""
    return uvicorn.Config(
        application,
        log_level=log_level,
        access_log=False,
        http=Impatient,
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_keep_alive=5,
    )
