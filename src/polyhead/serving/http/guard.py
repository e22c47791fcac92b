"""Who may ask: hosts, origins, keys, and how many requests run at a time.

Without a key the server is for programs of this machine: a request that names another host (DNS
rebinding) or comes from a page of another host is refused. With keys any client that has one is
served, under any name.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from polyhead.serving.http.errors import ApiError

MOST_REQUESTS = 512
"""Requests at a time, above which further ones get 503."""

_LOCAL = frozenset(("127.0.0.1", "localhost", "::1"))
_OPEN = frozenset(("/health", "/"))
"""Addresses that need no key: the page at / says nothing until it has one."""


class Guard:
    """Refuses a request before anything of it is read.

    Args:
        app: The application behind it.
        keys: Keys of which every request must bring one; none: only this machine is served.
    """

    def __init__(self, app: Any, keys: Collection[str] = ()) -> None:
        self.app = app
        self._keys = [_digest(key) for key in keys]
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1

    def _check(self, scope: Any) -> None:
        headers = Headers(scope=scope)
        scope["state"]["caller"] = ""
        if not scope["path"].startswith("/"):
            raise ApiError(400, "the request's target is not a path")
        if not self._keys:
            if _host(f"//{headers.get('host', '')}") not in _LOCAL:
                raise ApiError(400, "a server without a key answers to localhost alone")
            origin = headers.get("origin")
            if origin is not None and _host(origin) not in _LOCAL:
                raise ApiError(403, "a server without a key answers no page of another host")
        elif scope["path"] not in _OPEN:
            scope["state"]["caller"] = self._caller(headers)
        if self._running >= MOST_REQUESTS:
            raise ApiError(
                503, f"{MOST_REQUESTS} requests are running", code="overloaded", retry_after=2
            )

    def _caller(self, headers: Headers) -> str:
        """A name of the key that a request brings."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        # Every key is compared, so that the time tells nothing.
        known = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401, "give the server's key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return digest.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
