"""Listens and serves until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from polyhead.errors import InputError
from polyhead.serving.http.app import application
from polyhead.serving.http.connections import Server
from polyhead.serving.http.reports import LoadLines, fits
from polyhead.serving.http.served import Models

_LEAST_KEY = 8
"""Characters of a key at least."""


def checked_keys(keys: Sequence[str]) -> list[str]:
    """The keys.

    Raises:
        InputError: One that is too short to be secret, or that no header can hold.
    """
    for key in keys:
        if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                f"a key must be at least {_LEAST_KEY} printable ASCII characters without spaces: "
                f"got {len(key)} characters"
            )
    return list(keys)


def check_reach(host: str, keys: Collection[str]) -> None:
    """Raises InputError for an address that others reach, without a key."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not keys:
        raise InputError(f"--host {host} needs a key (--key or POLYHEAD_KEY): others reach it")


def serve(
    models: Models,
    *,
    host: str,
    port: int,
    keys: Collection[str] = (),
    write: Callable[[str], None],
    quiet: bool = False,
    page: str | None = None,
    show_heads: bool = False,
) -> None:
    """Serves until SIGINT or SIGTERM; requests then have 25 s to finish.

    Args:
        models: What is served.
        host, port: Where; port 0: any free one.
        keys: As ``application`` has them.
        write: Takes the lines that are printed.
        quiet: Print no load.
        page, show_heads: As ``application`` has them.

    Raises:
        InputError: A host that others reach, without a key.
        OSError: An address that cannot be had.
        Exception: ``models.lost``, which ends the server.
    """
    check_reach(host, keys)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client is told
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=512) as listener:
        for each in models.loaded:
            write(fits(each))
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        write(f"{address}/v1  (Ctrl-C ends it{'' if page is None else f'; load: {address}/'})")
        app = application(models, keys=keys, page=page, show_heads=show_heads)
        server = Server(app, models)
        asyncio.run(_served(server, listener, None if quiet else LoadLines(models, write)))
    if (lost := models.lost) is not None:
        raise lost


async def _served(server: Server, listener: socket.socket, lines: LoadLines | None) -> None:
    beside = [asyncio.create_task(server.end_where_lost())]
    if lines is not None:
        beside.append(asyncio.create_task(lines.run()))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in beside:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
