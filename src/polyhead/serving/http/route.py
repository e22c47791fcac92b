"""One address for several servers: a request goes to the server that has read its prefix before.

Servers are ranked for each beginning of a prompt (rendezvous hashing, Thaler and Ravishankar 1998),
so requests that begin alike meet the pages of their prefix, and where a server is added or fails
only its own share moves. Bytes of an answer pass as they come; a server that gives none is passed
over for a while, and a stream that breaks off between two events ends with an error. Keys, hosts
and other errors are the servers' own business.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from polyhead.errors import InputError, shortened
from polyhead.serving.http.body import BODY_SECONDS, MOST_BYTES
from polyhead.serving.http.connections import HEAD_SECONDS, UNREAD_SECONDS
from polyhead.serving.http.errors import ApiError

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

    def order(self, prefix: str) -> list[str]:
        """The servers as they are asked: by hash; those that were down a moment ago come last."""
        now = time.monotonic()
        rank = {url: hashlib.sha256(f"{url} {prefix}".encode()).digest() for url in self.urls}
        return sorted(rank, key=lambda url: (self.down.get(url, 0.0) > now, rank[url]))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request of a connection, and closes it."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head[:-4].lstrip().split(b"\r\n")
            length = _length(lines)
            if self._held + length > MOST_HELD:
                raise ApiError(503, "too many long requests wait", retry_after=2)
            self._held += length
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await reader.readexactly(length)
                kept = [line for line in lines if _name(line) not in _OF_CONNECTIONS]
                request = b"\r\n".join([first, *kept, b"Connection: close", b"", body])
                for url in self.order(prefix_of(body)):
                    if await self._passed(url, request, reader, writer):
                        return
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
        passing = asyncio.ensure_future(_pass(answer, writer))
        try:
            await asyncio.wait((leaving, passing), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done() or passing.result():
                return True  # a client that left: the server sees that, and cancels the request
        finally:
            for task in (leaving, passing):
                task.cancel()
            await asyncio.gather(leaving, passing, return_exceptions=True)
            server.close()
        self.down[url] = time.monotonic() + DOWN_SECONDS
        return False


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


async def _pass(answer: asyncio.StreamReader, client: asyncio.StreamWriter) -> bool:
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
        event = f"data: {json.dumps(gone.body())}\n\n"
        client.write(f"{len(event):x}\r\n{event}\r\n0\r\n\r\n".encode())
    return bool(end)


async def route(router: Router, host: str, port: int) -> asyncio.Server:
    """Listens; the server that is returned accepts connections until it is closed."""
    return await asyncio.start_server(router.serve, host, port, limit=_HEAD_BYTES)
