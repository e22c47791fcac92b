"""``polyhead generate``: a continuation on standard output as it is written, figures on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli import options

if TYPE_CHECKING:
    from polyhead.generation import GenerationStats


def generate(
    text: options.Prompt = None,
    model: options.ModelName = "smollm2",
    file: options.PromptFile = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given more than once.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message: use the model's chat template.")
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    quantize: options.Quantize = None,
    activations: options.Activations = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print text, tokens and statistics as JSON at the end.")
    ] = False,
) -> None:
    """Stream a continuation of TEXT.

    The text goes to standard output, speed and sizes to standard error.
    """
    from polyhead.cli.models import load_expecting
    from polyhead.cli.terminal import print_json, read_text, started, write_text
    from polyhead.generation import LanguageModel

    prompt = read_text(text, file)
    language_model = load_expecting(
        model, dtype, LanguageModel, device=device, quantize=quantize, activations=activations
    )
    stream = language_model.stream(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        chat=chat,
        stop=stop,
    )
    if json:
        written = "".join(started(stream))
        print_json({"prompt": prompt, "text": written, "ids": stream.ids, **as_data(stream.stats)})
        return
    try:
        for piece in started(stream):
            write_text(piece)
    finally:
        # Ctrl-C too: keep the text, end the line, and print the statistics so far.
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            write_text("\n")
            report(stream.stats)


def as_data(stats: GenerationStats) -> dict[str, Any]:
    """The figures of a generation for JSON."""
    from dataclasses import asdict

    return {**asdict(stats), "tokens_per_second": stats.tokens_per_second}


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
