"""``polyhead look``: every head of a real model on a text, in the terminal and as a page.

The options are read here. ``look_examine`` runs the model and finds what its heads do,
``look_table`` says that in the terminal or as JSON, ``look_files`` writes the page or the picture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli import options
from polyhead.errors import InputError, shortened

if TYPE_CHECKING:
    from polyhead.cli.look_examine import Found, Model
    from polyhead.models.parts import HeadsByLayer

_CONTINUATION = 24
"""Tokens of a decoder's continuation where the caller does not say how many."""

_LAYER = re.compile(r"[0-9]{1,4}")


_Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A known name, a Hugging Face directory, a .gguf file or a hub id; smollm2 where "
        "none is given, several with --serve.",
    ),
]
_Query = Annotated[str | None, typer.Option(help="Query word (its last occurrence).")]
_Key = Annotated[str | None, typer.Option(help="Key word.")]
_Pair = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="QUERY KEY", help="Query and key word at once: --pair it animal."),
]
_Find = Annotated[
    bool, typer.Option("--find", help="Label the heads: induction, previous-token, sink, …")
]
_Texts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --find: use the texts of this file, one per line."),
]
_Ablate = Annotated[
    str | None, typer.Option(metavar="HEADS", help="Ablate these heads: 3.1,7.4 (layer.head).")
]
_Draw = Annotated[
    str | None,
    typer.Option(metavar="HEADS", help="Draw these heads, 18.6,17.3, as the SVG file --out."),
]
_Serve = Annotated[bool, typer.Option("--serve", help="Open a local page for texts of any length.")]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port for --serve; 0: any free port.")]
_Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Where the page is written, polyhead-look.html, or with --draw the picture.",
    ),
]
_Page = Annotated[bool, typer.Option("--page/--no-page", help="Write the page.")]
_Layers = Annotated[str | None, typer.Option(help="Only these layers in the table, such as 0-3,7.")]
_NewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        help="New tokens to generate; default 24, 0: none. For an encoder-decoder: at most.",
    ),
]
_Source = Annotated[
    str | None,
    typer.Option("--from", metavar="CODE", help="For an encoder-decoder: source language code."),
]
_Target = Annotated[
    str | None,
    typer.Option("--to", metavar="CODE", help="For an encoder-decoder: target language code."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print all results as JSON.")]


@dataclass(frozen=True)
class _Wanted:
    """What the options ask for.

    Attributes:
        pair: Query word and key word; None: they are found.
        drawn: Heads of the picture, by layer; none: there is no picture.
        layers: The layers in the table; None: all.
        out: The file of the page or the picture.
        languages: Languages of the terminal and of the page, where None is the browser's.
        json: Whether everything is printed as JSON.
    """

    pair: tuple[str, str] | None
    ablated: HeadsByLayer
    drawn: HeadsByLayer
    layers: list[int] | None
    out: Path
    page: bool
    languages: tuple[str, str | None]
    json: bool


def look(
    text: options.Text = None,
    models: _Models = None,
    file: options.TextFile = None,
    query: _Query = None,
    key: _Key = None,
    pair: _Pair = None,
    find: _Find = False,
    texts: _Texts = None,
    ablate: _Ablate = None,
    draw: _Draw = None,
    serve: _Serve = False,
    port: _Port = 0,
    out: _Out = None,
    page: _Page = True,
    layers: _Layers = None,
    max_new_tokens: _NewTokens = None,
    source: _Source = None,
    target: _Target = None,
    dtype: options.PlainDtype = "float32",
    device: options.Device = "cpu",
    lang: options.Language = None,
    json: _Json = False,
) -> None:
    """See every head of a real model on TEXT.

    Prints the continuation that the model writes, then the heads that look most strongly from one
    word to another, and writes a page with all heads that opens in any browser.
    """
    from polyhead._utils.texts import language_of
    from polyhead.cli.look_files import check_writable
    from polyhead.cli.look_translation import look_at_translation
    from polyhead.cli.models import load_any
    from polyhead.cli.terminal import read_text

    language = language_of(lang)
    pair = _pair_of(pair, query, key)
    if texts is not None and not find:
        raise InputError("--texts needs --find: it names the texts on which heads are labeled")
    if serve:
        from polyhead.cli.look_serve import serve as serve_page

        begin = "" if text is None and file is None else read_text(text, file)
        serve_page(begin, models or [], (dtype, device), port, None if lang is None else language)
        return
    model, drawn = _one_of(models), _heads_of(draw)
    wanted = _Wanted(
        pair=pair,
        ablated=_heads_of(ablate),
        drawn=drawn,
        layers=None if layers is None else _layers_of(layers),
        out=out or Path("polyhead-look.svg" if drawn else "polyhead-look.html"),
        page=page,
        languages=(language, lang),
        json=json,
    )
    many = [] if texts is None else _lines_of(texts)
    content = many[0] if many and text is None and file is None else read_text(text, file)
    if page or drawn:
        check_writable(wanted.out)
    loaded = load_any(model, dtype, device)
    from polyhead.generation import TextToText

    if isinstance(loaded, TextToText):
        given = {"--pair": pair, "--find": find, "--ablate": ablate, "--draw": draw,
                 "--layers": layers}  # fmt: skip
        _refuse_options(model, given)
        arguments = {"source_language": source, "target_language": target,
                     "max_new_tokens": max_new_tokens}  # fmt: skip
        place = wanted.out if page else None
        look_at_translation(
            model, loaded, content, arguments, place, languages=wanted.languages, json=json
        )
        return
    if source is not None or target is not None:
        raise InputError(f"--from and --to are for models that translate: {model} does not")
    count = _CONTINUATION if max_new_tokens is None else max_new_tokens
    _look_at_heads(model, loaded, content, (many or [content]) if find else [], count, wanted)


def _look_at_heads(
    name: str, model: Model, text: str, labelled: list[str], max_new_tokens: int, wanted: _Wanted
) -> None:
    """Looks at a decoder or an encoder; ``labelled`` are the texts on which heads are labelled."""
    from polyhead.cli.look_examine import check, examine
    from polyhead.cli.look_files import reason_against_page
    from polyhead.interpret.heads import TokenizedText

    tokens = TokenizedText.of(model.tokenizer, text)
    heads = wanted.ablated, wanted.drawn
    check(model, tokens, pair=wanted.pair, heads=heads, layers=wanted.layers)
    refusal = None
    if wanted.page and not wanted.drawn:
        refusal = reason_against_page(model, len(tokens.ids))
    if refusal is not None and not wanted.json:
        print(f"No page is written: {refusal}; --serve opens one for texts of any length\n")
    found = examine(
        name,
        model,
        tokens,
        pair=wanted.pair,
        ablated=wanted.ablated,
        layers=wanted.layers,
        labelled=labelled,
        max_new_tokens=max_new_tokens,
        echo=not wanted.json,
    )
    _present(found, wanted, refusal)


def _refuse_options(model: str, given: Mapping[str, object]) -> None:
    """InputError where an option is given that an encoder-decoder cannot have."""
    if others := [option for option, value in given.items() if value]:
        raise InputError(f"{others[0]} is for decoders and encoders: {model} is neither")


def _present(found: Found, wanted: _Wanted, refusal: str | None) -> None:
    """Writes the picture or the page, and says what was found as JSON or in the terminal."""
    from polyhead._utils.texts import Texts
    from polyhead.cli.look_files import write_page, write_picture
    from polyhead.cli.look_table import as_data, show
    from polyhead.cli.terminal import print_json

    page = wanted.page and refusal is None
    if wanted.drawn:
        write_picture(wanted.out, found, wanted.drawn)
    elif page:
        write_page(wanted.out, found, wanted.languages[1])
    place = wanted.out.resolve() if wanted.drawn or page else None
    if wanted.json:
        print_json(as_data(found, place, refusal))
        return
    show(found, wanted.languages[0])
    if place is not None:
        said = Texts(wanted.languages[0], "look")
        print("\n" + said("picture" if wanted.drawn else "page", place=place))


def _pair_of(
    pair: tuple[str, str] | None, query: str | None, key: str | None
) -> tuple[str, str] | None:
    if (query is None) != (key is None):
        raise InputError("give --query and --key together, or neither")
    if pair is not None and query is not None:
        raise InputError("give --pair, or --query and --key: got both")
    return pair if query is None or key is None else (query, key)


def _layers_of(text: str) -> list[int]:
    """``"0-3,7"`` as ``[0, 1, 2, 3, 7]``; InputError where it is not of that form."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (_LAYER.fullmatch(first) and (not dash or _LAYER.fullmatch(last))):
            raise InputError(f"--layers must look like 0-3,7: got {shortened(text)}")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _one_of(models: list[str] | None) -> str:
    model, *others = models or ["smollm2"]
    if others:
        raise InputError(f"one --model at a time, several with --serve: got {model}, {others[0]}")
    return model


def _heads_of(text: str | None) -> HeadsByLayer:
    """``"3.1,7.4"`` as heads by layer; none of None."""
    from polyhead.models.parts import parse_heads

    return {} if text is None else parse_heads(text)


def _lines_of(file: Path) -> list[str]:
    """The texts of a file, one a line; InputError where there is none."""
    from polyhead.cli.terminal import read_text

    lines = [line for line in read_text(None, file).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"--texts: {file} holds no text, one is expected on each line")
    return lines
