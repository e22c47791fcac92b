"""``polyhead batch``: a file of requests in OpenAI's batch format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli import options
from polyhead.errors import UnsupportedError


def batch(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="Requests in OpenAI's batch format.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Answers every request, whatever model it names; default: the models that the "
            "requests name.",
            autocompletion=options.known_models,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The answers; default: FILE.answers.jsonl."
        ),
    ] = None,
    max_tokens: options.MaxTokens = None,
    max_rows: options.MaxRows = 32,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    quantize: options.Quantize = None,
    activations: options.Activations = None,
) -> None:
    """Answer a file of requests.

    Answers are appended to --out as they come, in any order; after an interruption the same command
    answers the rest. Requests that are refused are answered with the error, and the command then
    ends with exit code 1.
    """
    import asyncio

    from polyhead.cli.models import load_served
    from polyhead.cli.terminal import console, progress

    try:
        from polyhead.serving.http import batch as work
        from polyhead.serving.http.api import Api
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"polyhead batch needs {error.name}: pip install 'polyhead[serve]'"
        ) from error
    asked = work.read_batch(file)
    place = out or file.with_name(f"{file.stem}.answers.jsonl")
    done = work.answered(place, asked)
    total, screen = len(asked.places), console(stderr=True)
    if done:
        screen.print(f"{len(done):,} of {total:,} are answered already", soft_wrap=True)
    names = [model] if model is not None else list(asked.models)
    engine = {"max_tokens": max_tokens, "max_rows": max_rows}
    models = None
    if len(done) < total:
        packing = {"quantize": quantize, "activations": activations}
        sources = {each: each for each in names}
        models = load_served(sources, dtype, device, engine, packing=packing, timeout=None)
    refused = 0
    if models is not None:
        models.start()
        try:
            with progress("answering") as advance:
                refused = asyncio.run(
                    work.run_batch(
                        Api(models),
                        asked,
                        place,
                        done,
                        model=next(iter(models)) if model is not None else None,
                        at_once=min(2 * max_rows, 48),
                        advance=lambda count: advance("answering", count, total),
                    )
                )
        finally:
            models.close(timeout=5.0)
    screen.print(f"{total:,} answers are in {place}", soft_wrap=True)
    if refused:
        screen.print(f"{refused:,} of them are errors", soft_wrap=True)
        raise typer.Exit(1)
