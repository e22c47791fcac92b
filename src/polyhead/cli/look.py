"""``polyhead look``: every head of a real model on a text, in the terminal and as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from polyhead.generation import Generation, LanguageModel
    from polyhead.inspection.heads import Pair, TokenizedText
    from polyhead.inspection.probe import Probe

_DEMO_PAIR = ("it", "animal")
_ECHO = 400
"""Characters of the prompt that are shown before its continuation."""


def look(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="The text; @FILE reads it from a file, - from standard input."
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A known name, a Hugging Face directory, a .gguf file or a hub id; smollm2 where "
            "none is given, several with --serve.",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the text from this file.")
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="The word that looks (its last occurrence).")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The word that is looked at.")] = None,
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="QUERY KEY", help="Both at once: --pair it animal."),
    ] = None,
    find: Annotated[
        bool, typer.Option("--find", help="Label the heads: induction, previous-token, sink, …")
    ] = False,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --find: over the texts of this file, one a line."),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(metavar="HEADS", help="Look without these heads: 3.1,7.4 (layer.head)."),
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(metavar="HEADS", help="Draw these heads, 18.6,17.3, as the SVG file --out."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Open a local page for texts of any length.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of --serve; 0: any that is free.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Where the page is written, polyhead-look.html, or with --draw the picture.",
        ),
    ] = None,
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
    from polyhead.cli import look_heads
    from polyhead.cli.look_page import check_writable, write_page
    from polyhead.cli.look_table import as_data, labels_as_data, show, show_labels, show_next
    from polyhead.cli.models import load_any
    from polyhead.cli.terminal import print_json, progress, read_text
    from polyhead.errors import InputError

    pair = _pair_of(pair, query, key)
    if texts is not None and not find:
        raise InputError("--texts goes with --find: heads are labelled over many texts")
    if serve:
        from polyhead.cli.serve import serve as serve_page

        begin = "" if text is None and file is None else read_text(text, file)
        serve_page(begin, models or [], dtype, port)
        return
    model, *others = models or ["smollm2"]
    if others:
        raise InputError(f"one --model at a time, several with --serve: got {model}, {others[0]}")
    chosen = None if layers is None else parse_layers(layers)
    ablated, drawn = look_heads.parsed(ablate), look_heads.parsed(draw)
    many = None if texts is None else look_heads.lines_of(texts)
    content = many[0] if many and text is None and file is None else read_text(text, file)
    out = out or Path("polyhead-look.svg" if drawn else "polyhead-look.html")
    if page or drawn:
        check_writable(out)
    loaded = load_any(model, dtype)

    import torch

    from polyhead.generation import LanguageModel
    from polyhead.inspection.heads import TokenizedText, rank_heads
    from polyhead.inspection.tables import run_ids

    tokens = TokenizedText.of(loaded.tokenizer, content)
    written = None
    changed = look_heads.next_tokens(loaded, tokens, ablated)
    with look_heads.without(loaded, ablated):
        if isinstance(loaded, LanguageModel) and max_new_tokens != 0:
            written = _continue(loaded, content, max_new_tokens, show=not json)
        with progress("looking at every head") as advance:
            seen = run_ids(loaded, torch.tensor([tokens.ids]))
            for number, view in enumerate(seen):
                advance("looking at every head", number, len(seen))
                view.summary()
    found, remark = _choose_pair(seen, tokens, pair, loaded.config.kind == "decoder")
    looks = rank_heads(seen, found)
    if chosen is not None:
        looks = [entry for entry in looks if entry.layer in _checked(chosen, seen)]
    scores = look_heads.scores_of(loaded, many or [content], pair) if find else None
    place = refusal = None
    if drawn:
        look_heads.draw(out, model, seen, tokens, drawn)
        place = out.resolve()
    elif page:
        refusal = write_page(out, model, loaded, seen, tokens, found, written)
        place = out.resolve() if refusal is None else None
    if json:
        data = as_data(model, tokens, found, looks, written, place, refusal)
        if scores is not None:
            data["labels"] = labels_as_data(scores.labels())
        if changed is not None:
            data["next_tokens"] = {"as_it_is": changed[0], "ablated": changed[1]}
        print_json(data)
        return
    if changed is not None:
        show_next(*changed)
    show(tokens, found, remark, looks)
    if scores is not None:
        show_labels(scores)
    if place is not None:
        print(f"\nThe {'picture' if drawn else 'page with all heads'}: {place}")
    elif refusal is not None:
        print(f"\nNo page was written: {refusal}; --serve opens one for texts of any length")


def _pair_of(
    pair: tuple[str, str] | None, query: str | None, key: str | None
) -> tuple[str, str] | None:
    from polyhead.errors import InputError

    if (query is None) != (key is None):
        raise InputError("give --query and --key together, or neither")
    if pair is not None and query is not None:
        raise InputError("give --pair, or --query and --key: got both")
    return pair if query is None or key is None else (query, key)


def parse_layers(text: str) -> list[int]:
    """``"0-3,7"`` as ``[0, 1, 2, 3, 7]``; InputError where it is not of that form."""
    from polyhead.errors import InputError

    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(f"--layers must look like 0-3,7: got {text!r}")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _checked(chosen: list[int], seen: Probe) -> list[int]:
    from polyhead.errors import InputError

    for layer in chosen:
        if layer not in seen.layers:
            raise InputError(f"--layers: the model's layers are 0 to {len(seen) - 1}: got {layer}")
    return chosen


def _continue(model: LanguageModel, text: str, max_new_tokens: int, *, show: bool) -> Generation:
    """The continuation, streamed to the terminal behind its prompt."""
    from polyhead.cli.generate import figures
    from polyhead.cli.terminal import BOLD, FAINT, started, write_text
    from polyhead.generation import Generation

    stream = model.stream(text, max_new_tokens=max_new_tokens)
    echo = f"…{text[-_ECHO:]}" if len(text) > _ECHO else text
    pieces: list[str] = []
    try:
        for piece in started(stream):
            if show and not pieces:
                write_text(echo, style=FAINT)
            pieces.append(piece)
            if show:
                write_text(piece, style=BOLD)
        if show and not pieces:
            write_text(echo, style=FAINT)
    finally:
        if show and not isinstance(sys.exc_info()[1], BrokenPipeError):
            print(flush=True)
    if show:
        write_text(figures(stream.stats) + "\n", style=FAINT)
    return Generation("".join(pieces), tuple(stream.ids), stream.stats)


def _choose_pair(
    seen: Probe, tokens: TokenizedText, pair: tuple[str, str] | None, causal: bool
) -> tuple[Pair, str]:
    """The pair to show, and why it was chosen where the user did not say."""
    from polyhead.inspection.heads import find_pair, strongest_pair

    if pair is not None:
        return find_pair(tokens, *pair, causal=causal), ""
    words = [tokens.find(word, whole=True) for word in _DEMO_PAIR]
    if all(words) and (not causal or words[1][0][0] < words[0][-1][-1]):
        return find_pair(tokens, *_DEMO_PAIR, causal=causal), ""
    strongest = strongest_pair(seen, tokens)
    return (
        strongest,
        "Chosen by itself: where the last word looks most (--pair says).",
    )
