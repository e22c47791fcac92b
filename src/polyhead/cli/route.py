"""``polyhead route``: one address for several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from polyhead.errors import UnsupportedError


def route(
    servers: Annotated[
        list[str],
        typer.Argument(metavar="URL...", help="Servers of the same models: http://HOST:PORT."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8080,
) -> None:
    """Send requests to several servers of ``polyhead serve``.

    Requests that begin alike go to the same server, which has their prefix; where it is down, to
    the next. Every request is checked by its server: give all of them the same keys. SIGTERM and
    Ctrl-C let requests finish, for 25 s; a second one ends them.
    """
    import asyncio
    import signal

    from polyhead.cli.terminal import console

    try:
        from polyhead.serving.http.route import Router, address_of, run
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"polyhead route needs {error.name}: pip install 'polyhead[serve]'"
        ) from error
    for url in servers:
        address_of(url)
    screen = console(stderr=True)

    def tell(port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        screen.print(f"http://{name}:{port}/v1  (Ctrl-C ends it)", soft_wrap=True)

    if asyncio.run(run(Router([*dict.fromkeys(servers)]), host, port, tell)) == signal.SIGINT:
        raise KeyboardInterrupt
