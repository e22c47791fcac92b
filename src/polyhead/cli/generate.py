"""``polyhead generate``: a continuation on standard output as it is written, figures on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from polyhead.generation import GenerationStats


def generate(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="The prompt; @FILE reads it from a file, - from standard input."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A known name, a Hugging Face directory, a .gguf file or a hub id.",
        ),
    ] = "smollm2",
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from this file.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Stop after so many tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 is greedy; larger is more varied.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that reach probability p.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given more than once.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message: use the model's chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Stream a continuation of TEXT.

    The text goes to standard output, speed and sizes to standard error.
    """
    from polyhead.cli.models import load_expecting
    from polyhead.cli.terminal import read_text, started, write_text
    from polyhead.generation import LanguageModel

    prompt = read_text(text, file)
    language_model = load_expecting(model, dtype, LanguageModel)
    stream = language_model.stream(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat=chat,
        stop=stop,
    )
    try:
        for piece in started(stream):
            write_text(piece)
    finally:
        # Ctrl-C too: what was written stays, the line is ended, the figures say how far it came.
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            write_text("\n")
            report(stream.stats)


def report(stats: GenerationStats) -> None:
    """Prints the figures of a generation on standard error."""
    from polyhead.cli.terminal import console

    console(stderr=True).print(figures(stats), style="dim", soft_wrap=True)


def figures(stats: GenerationStats) -> str:
    """One line: sizes, speeds, why it ended."""
    parts = [
        f"{stats.prompt_tokens:,} tokens read in {stats.prefill_seconds:.2f} s",
        f"{stats.new_tokens:,} written",
    ]
    if stats.tokens_per_second is not None:
        parts[-1] += f" at {stats.tokens_per_second:.1f} tokens/s"
    parts.append(f"KV cache {stats.cache_used_bytes:,} bytes for {stats.cache_tokens:,} tokens")
    if stats.stop_reason:
        parts.append(f"ended by {stats.stop_reason}")
    if stats.seed is not None:
        parts.append(f"seed {stats.seed}")
    return " · ".join(parts)
