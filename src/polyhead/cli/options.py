"""Options that several verbs take, so that they are the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _known_models(incomplete: str) -> list[str]:
    from polyhead.checkpoints.catalogue import KNOWN_MODELS

    return [known.name for known in KNOWN_MODELS if known.name.startswith(incomplete)]


_KIND = "A known name, a Hugging Face directory, a .gguf file or a hub id."

ModelName = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help=_KIND, autocompletion=_known_models),
]
Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT", help="The prompt; @FILE reads it from a file, - from standard input."
    ),
]
PromptFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read the prompt from this file.")
]
Dtype = Annotated[str, typer.Option(help="Of weights: float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", help="Stop after so many tokens.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy; larger is more varied.")
]
TopK = Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the likeliest tokens that reach probability p.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Scores of tokens that are there already are divided by it.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.")]
