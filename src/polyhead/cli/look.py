"""``polyhead look``: every head of a real model on a text, in the terminal and as a page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyhead.generation import GenerationStats, LanguageModel, TextEncoder
    from polyhead.inspection.heads import HeadLook, Pair
    from polyhead.inspection.probe import Probe

_DEMO_PAIR = ("it", "animal")
_ROWS = 10


def look(
    text: Annotated[
        str | None,
        typer.Argument(help="The text; @FILE reads it from a file, - from standard input."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A known name, a Hugging Face directory, a .gguf file or a hub id.",
        ),
    ] = "smollm2",
    file: Annotated[Path | None, typer.Option(help="Read the text from this file.")] = None,
    query: Annotated[
        str | None, typer.Option(help="The word that looks (its last occurrence).")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The word that is looked at.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where the page is written.")
    ] = Path("polyhead-look.html"),
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page.")] = True,
    layers: Annotated[
        str | None, typer.Option(help="Only these layers in the table, such as 0-3,7.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens of continuation; 0 for none.")
    ] = 24,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """See every head of a real model on TEXT.

    Prints the continuation that the model writes, then the heads that look most strongly from one
    word to another, and writes a page with all heads that opens in any browser.
    """
    from polyhead.cli.models import load_any
    from polyhead.cli.terminal import print_json, read_text
    from polyhead.errors import InputError
    from polyhead.generation import LanguageModel
    from polyhead.inspection.heads import rank_heads

    if (query is None) != (key is None):
        raise InputError("give --query and --key together, or neither")
    content = read_text(text, file)
    if page:
        _check_writable(out)
    loaded = load_any(model, dtype)
    tokens = _Tokens.of(loaded, content)
    written: tuple[str, GenerationStats] | None = None
    if isinstance(loaded, LanguageModel) and max_new_tokens:
        written = _continue(loaded, content, max_new_tokens, show=not json)
    seen = _watch(loaded, tokens.ids, None if layers is None else _layer_numbers(layers))
    pair, remark = _choose_pair(seen, tokens.pieces, query, key, loaded.config.kind != "encoder")
    looks = rank_heads(seen, pair)
    path, refusal = (None, None)
    if page:
        path, refusal = _write_page(out, loaded, model, content, tokens, pair, written)
    if json:
        print_json(_as_data(model, content, tokens.pieces, pair, looks, written, path, refusal))
        return
    _show(pair, remark, looks, tokens.pieces, path, refusal)
