"""One address for several servers: a request goes to the server that has read its prefix before.

Servers are ranked for each beginning of a prompt (rendezvous hashing, Thaler and Ravishankar 1998),
so requests that begin alike meet the pages of their prefix, and where a server is added or fails
only its own share moves. Bytes of an answer pass as they come; a server that gives none is passed
over for a while, and a stream that breaks off between two events ends with an error. Keys, hosts
and other errors are the servers' own business. It ends as they do: requests that run have a time to
finish, others get 503.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from polyhead.errors import InputError, shortened
from polyhead.serving.http.body import BODY_SECONDS, MOST_BYTES
from polyhead.serving.http.connections import (
    GRACE_SECONDS,
    HEAD_SECONDS,
    TELLING_SECONDS,
    UNREAD_SECONDS,
)
from polyhead.serving.http.errors import ApiError, server_ending

PREFIX = 256
"""Characters of a prompt that choose the server."""
DOWN_SECONDS = 5.0
"""Seconds for which a server that did not answer is asked last."""
MOST_HELD = 16 * MOST_BYTES
"""Bytes of requests that wait for their answers."""
_CONNECT_SECONDS = 3.0
_HEAD_BYTES = 16 << 10
_EVENT = b"\n\n\r\n"
"""How a chunk ends that is an event; no whole answer ends so."""
_OF_CONNECTIONS = (b"connection", b"expect", b"keep-alive")


def address_of(url: str) -> tuple[str, int, bool]:
    """Host, port, and whether there is TLS.

    Raises:
        InputError: No address of a server.
    """
    with suppress(ValueError):
        found = urlsplit(url)
        tls = found.scheme == "https"
        plain = found.path in ("", "/") and not found.query and not found.username
        if found.scheme in ("http", "https") and found.hostname and plain:
            return found.hostname, found.port or (443 if tls else 80), tls
    raise InputError(f"a server must be http://HOST:PORT or https://HOST: got {shortened(url)}")


def prefix_of(body: bytes) -> str:
    """What chooses the server of a request: its model, and how its text begins."""
    try:
        found = json.loads(body)
        given = found.get("messages", found.get("prompt", found.get("input", "")))
        return json.dumps([found.get("model"), given])[:PREFIX]
    except (ValueError, AttributeError, RecursionError):
        return hashlib.sha256(body).hexdigest()


class Router:
    """Sends requests to servers.

    Args:
        urls: Of the servers.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls, self.down, self._held = list(urls), dict[str, float](), 0
        self._running, self._ending, self._over = set[object](), False, asyncio.Event()

    def order(self, prefix: str) -> list[str]:
        """The servers as they are asked: by hash; those that were down a moment ago come last."""
        now = time.monotonic()
        rank = {url: hashlib.sha256(f"{url} {prefix}".encode()).digest() for url in self.urls}
        return sorted(rank, key=lambda url: (self.down.get(url, 0.0) > now, rank[url]))

    async def end(self, hurried: asyncio.Event) -> None:
        """Takes no more requests; those that run have ``GRACE_SECONDS``, then they get an error.

        Args:
            hurried: Once it is set, they have no more time.
        """
        self._ending = True
        await self._finished(GRACE_SECONDS, hurried)
        self._over.set()
        await self._finished(TELLING_SECONDS, asyncio.Event())

    async def _finished(self, seconds: float, hurried: asyncio.Event) -> None:
        last = time.monotonic() + seconds
        while self._running and not hurried.is_set() and time.monotonic() < last:
            await asyncio.sleep(0.02)

    async def _unless_over(self, reading: Awaitable[bytes]) -> bytes:
        """What is read of a client, unless there is no more time for it."""
        came, over = asyncio.ensure_future(reading), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((came, over), return_when=asyncio.FIRST_COMPLETED)
            if not came.done():
                raise server_ending()
            return came.result()
        finally:
            came.cancel()
            over.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request of a connection, and closes it."""
        request = object()
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            self._running.add(request)
            first, *lines = head[:-4].lstrip().split(b"\r\n")
            length = _length(lines)
            if self._held + length > MOST_HELD:
                raise ApiError(503, "too many long requests wait", retry_after=2)
            self._held += length
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._unless_over(reader.readexactly(length))
                if self._ending:
                    raise server_ending()
                kept = [line for line in lines if _name(line) not in _OF_CONNECTIONS]
                passed = b"\r\n".join([first, *kept, b"Connection: close", b"", body])
                for url in self.order(prefix_of(body)):
                    if await self._passed(url, passed, reader, writer):
                        return
                    if self._over.is_set():
                        raise server_ending()
            finally:
                self._held -= length
            raise ApiError(503, f"none of {len(self.urls)} servers answers", retry_after=5)
        except ApiError as error:
            answer = error.response()
            writer.write(b"HTTP/1.1 %d Refused\r\nConnection: close\r\n" % error.status)
            writer.writelines(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
            writer.write(b"\r\n" + bytes(answer.body))
            with suppress(OSError):
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # the client went away, or is no client
        finally:
            writer.close()
            self._running.discard(request)

    async def _passed(
        self, url: str, request: bytes, client: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether a server's answer has been passed on, or there is nobody to pass it to."""
        host, port, tls = address_of(url)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                answer, server = await asyncio.open_connection(host, port, ssl=tls or None)
        except (OSError, TimeoutError):
            self.down[url] = time.monotonic() + DOWN_SECONDS
            return False
        server.write(request)
        leaving = asyncio.ensure_future(_gone(client))
        passing = asyncio.ensure_future(self._pass(answer, writer))
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((leaving, passing, over), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                server.transport.abort()  # which ends the answer
                await asyncio.wait((leaving, passing), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done() or passing.result():
                return True  # a client that left: the server sees that, and cancels the request
        finally:
            for task in (leaving, passing, over):
                task.cancel()
            await asyncio.gather(leaving, passing, over, return_exceptions=True)
            server.close()
        self.down[url] = time.monotonic() + DOWN_SECONDS
        return False

    async def _pass(self, answer: asyncio.StreamReader, client: asyncio.StreamWriter) -> bool:
        """Passes an answer back as it comes; whether there was one."""
        end = b""
        with suppress(ConnectionError):
            while part := await answer.read(1 << 16):
                end = (end + part)[-len(_EVENT) :]
                client.write(part)
                async with asyncio.timeout(UNREAD_SECONDS):
                    await client.drain()
        if end == _EVENT:
            gone = ApiError(502, "the server ended before its answer did", code="server_gone")
            told = server_ending() if self._over.is_set() else gone
            event = b"data: %b\n\n" % bytes(told.response().body)
            client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        return bool(end)


def _name(line: bytes) -> bytes:
    return line.partition(b":")[0].strip().lower()


def _length(lines: Sequence[bytes]) -> int:
    """Bytes of the body of a request with these headers."""
    found = [line.partition(b":")[2].strip() for line in lines if _name(line) == b"content-length"]
    chunked = any(_name(line) == b"transfer-encoding" for line in lines)
    if chunked or len(found) > 1 or not all(each.isdigit() and len(each) < 16 for each in found):
        raise ApiError(411, "a request must state its Content-Length, once")
    length = int(found[0]) if found else 0
    if length > MOST_BYTES:
        raise ApiError(413, f"a request holds at most {MOST_BYTES >> 20} MiB")
    return length


async def _gone(client: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await client.read(1 << 10):
            pass


async def route(router: Router, host: str, port: int) -> asyncio.Server:
    """Listens; the server that is returned accepts connections until it is closed."""
    return await asyncio.start_server(router.serve, host, port, limit=_HEAD_BYTES)


async def run(router: Router, host: str, port: int, tell: Callable[[int], None]) -> signal.Signals:
    """Listens until SIGINT or SIGTERM; requests then have 25 s to finish, until a second signal.

    Args:
        router: Answers requests.
        host, port: Where; port 0: any free one.
        tell: Takes the port, once it is listened on.

    Returns:
        The first signal.

    Raises:
        OSError: An address that cannot be had.
    """
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop, hurried = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # Windows: Ctrl-C ends it at once
            loop.add_signal_handler(each, signals.put_nowait, each)
    listening = await route(router, host, port)
    tell(listening.sockets[0].getsockname()[1])
    first = await signals.get()
    listening.close()
    ending = asyncio.ensure_future(router.end(hurried))
    second = asyncio.ensure_future(signals.get())
    await asyncio.wait((ending, second), return_when=asyncio.FIRST_COMPLETED)
    hurried.set()
    await ending
    second.cancel()
    return first
