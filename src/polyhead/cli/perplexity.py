"""``polyhead perplexity``: how well a model predicts files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli import options


def perplexity(
    model: options.ModelArgument,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="UTF-8 text files, evaluated separately."),
    ],
    window: Annotated[
        int | None,
        typer.Option(help="Tokens in a window; default: the model's context, at most 1,024."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between the starts of windows; default: half a window."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "--batch", help="Windows in a batch.")
    ] = 1,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    quantize: options.Quantize = None,
    activations: options.Activations = None,
    json: options.Json = False,
) -> None:
    """Measure the perplexity and bits per byte of a model on texts.

    Example: polyhead perplexity smollm2 book.txt --window 2048 --stride 512
    """
    from dataclasses import asdict

    from polyhead.cli.models import load_expecting
    from polyhead.cli.terminal import console, print_json, progress, read_text
    from polyhead.generation import LanguageModel
    from polyhead.training.evaluation import perplexity as evaluate

    texts = [read_text(None, file) for file in files]
    loaded = load_expecting(
        model, dtype, LanguageModel, device=device, quantize=quantize, activations=activations
    )
    with progress("perplexity") as advance:
        found = evaluate(
            loaded, texts, window=window, stride=stride, batch_size=batch_size, progress=advance
        )
    if json:
        figures = {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        print_json(figures | asdict(found))
    else:
        console().print(str(found))
