"""``polyhead serve``: OpenAI's API for many callers."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer

from polyhead.cli import options, ranks
from polyhead.errors import InputError, UnsupportedError

_Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Known names, Hugging Face directories, .gguf files or hub ids: decoders, encoders of "
        "text (embeddings), Whisper (transcriptions).",
        autocompletion=options.known_models,
    ),
]
_KEY = "POLYHEAD_KEY"


def serve(
    models: _Models,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="A LoRA adapter (PEFT) of the decoder, which requests choose as model NAME; may "
            "be given more than once. With several decoders: MODEL:NAME=DIR.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Serve only requests with this key; may be given more than once. Other users of "
            f"the machine can read a command line: {_KEY} holds keys too, separated by commas.",
        ),
    ] = None,
    max_tokens: options.MaxTokens = None,
    max_rows: options.MaxRows = 32,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that wait; further ones get 429.")
    ] = 256,
    prompt_seconds: options.PromptSeconds = 1.0,
    lookup_tokens: options.LookupTokens = 0,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = 4,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", min=1, help="New tokens of a chat that names no limit."
        ),
    ] = 1024,
    timeout: Annotated[str, typer.Option(help="Longest time of a request, such as 90s.")] = "10m",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no load.")] = False,
    show_heads: Annotated[
        bool,
        typer.Option(
            "--show-heads",
            help="On the page of the load, show the text of a running request to callers with its "
            "key, and what any head looks at in it.",
        ),
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    quantize: options.Quantize = None,
    activations: options.Activations = None,
) -> None:
    """Serve models to many callers, with OpenAI's API.

    A text has the tokens that it has alone, whoever is served beside it. docs/server.md lists the
    options of requests; a browser shows the load at the server's address. SIGTERM and Ctrl-C let
    requests finish, for 25 s; a second one ends them.

    Processes that torchrun starts share one decoder, split over them; the first answers:
    torchrun --nproc-per-node 2 --no-python polyhead serve MODEL
    """
    from polyhead.cli.models import load_served
    from polyhead.cli.terminal import console

    keys = [*(key or []), *filter(None, os.environ.get(_KEY, "").split(","))]
    seconds = options.duration("--timeout", timeout)
    try:
        from polyhead.serving.http import server
        from polyhead.viewer.load_page import render
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"polyhead serve needs {error.name}: pip install 'polyhead[serve]'"
        ) from error
    keys = server.checked_keys(keys)
    server.check_reach(host, keys)
    prepare = None
    with ExitStack() as stack:
        if ranks.count() > 1:
            given = {"--adapter": adapter, "--show-heads": show_heads, "--device": device != "cpu"}
            ranks.check({"several models": len(models) > 1, **given})
            prepare = partial(ranks.lead, stack)
        served = load_served(
            _named(models),
            dtype,
            device,
            {
                "max_tokens": max_tokens,
                "max_rows": max_rows,
                "max_queue": max_queue,
                "prompt_seconds": prompt_seconds or None,
                "lookup_tokens": lookup_tokens,
                "draft_tokens": draft_tokens,
            },
            adapter or (),
            draft,
            {"quantize": quantize, "activations": activations},
            prepare,
            timeout=seconds,
            max_new_tokens=max_new_tokens,
        )
        screen = console(stderr=True)
        server.serve(
            served,
            host=host,
            port=port,
            keys=keys,
            write=lambda line: screen.print(line, soft_wrap=True),
            quiet=quiet,
            page=render(),
            show_heads=show_heads,
        )


def _named(sources: list[str]) -> dict[str, str]:
    """Sources by the names that requests use: a path's last part, or what the user wrote.

    Raises:
        InputError: Two models of one name.
    """
    found: dict[str, str] = {}
    for source in sources:
        name = source
        if os.path.exists(source):
            name = os.path.basename(os.path.abspath(source)).removesuffix(".gguf")
        if name in found:
            raise InputError(f"two models are called {name!r}: requests could not tell them apart")
        found[name] = source
    return found
