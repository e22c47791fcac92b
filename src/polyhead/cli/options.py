"""Options that several verbs share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from polyhead.errors import InputError, shortened


def known_models(incomplete: str) -> list[str]:
    """Names of known models that begin in a way, for a shell's completion."""
    from polyhead.checkpoints.catalogue import KNOWN_MODELS

    return [known.name for known in KNOWN_MODELS if known.name.startswith(incomplete)]


def duration(option: str, text: str) -> float:
    """``"30m"``, ``"90s"`` or ``"1.5h"`` in seconds."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smh])", text.strip().lower())
    if found is None or not float(found[1]):
        raise InputError(f"{option} must be a time such as 90s, 30m or 2h: got {shortened(text)}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


_KIND = "A known name, a Hugging Face directory, a .gguf file or a hub id."

ModelName = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help=_KIND, autocompletion=known_models),
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_KIND)]
Text = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT", help="The text; @FILE reads it from a file, - from standard input."
    ),
]
TextFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read the text from this file.")
]
PlainDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT", help="The prompt; @FILE reads it from a file, - from standard input."
    ),
]
PromptFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read the prompt from this file.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Dtype of the weights: float32, bfloat16, float16 or auto; default float32, and "
        "quantized weights of a GGUF file as it holds them."
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(help="Pack weights that are numbers as blocks of a GGUF type, such as Q8_0."),
]
Activations = Annotated[
    str | None, typer.Option(help="int8: round the inputs of quantized layers to 8 bits.")
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps, ...")]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", help="Stop after this many tokens.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens that the cache of each decoder holds; default: what fits."),
]
MaxRows = Annotated[int, typer.Option(min=1, help="Requests that are computed at a time.")]
PromptSeconds = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds that a round reads prompts at most while others write; 0: no limit."
    ),
]
LookupTokens = Annotated[
    int,
    typer.Option(
        min=0, max=7, help="Tokens guessed from a request's own text and checked in one step."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A smaller decoder with the same vocabulary, which guesses tokens of the only "
        "decoder; they are checked in one step. mtp: the decoder's own module of multi-token "
        "prediction.",
        autocompletion=known_models,
    ),
]
DraftTokens = Annotated[
    int, typer.Option(min=1, max=7, help="Tokens that it guesses at most, fewer where that pays.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy; larger is more varied.")
]
TopK = Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the most likely tokens whose probabilities add up to p."),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: make tokens that already occurred less likely.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.")]
Language = Annotated[
    str | None,
    typer.Option(
        "--lang",
        metavar="LANG",
        help="Language of the texts, en or zh; default: the locale's, or the browser's.",
    ),
]
