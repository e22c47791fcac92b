"""``polyhead trace``: one attention, every number shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.options import Device, Language

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from polyhead._utils.texts import Texts
    from polyhead.interpret.trace.steps import Trace, TraceStep

_MOST_TERMS = 8
_MOST_TOKENS = 16
_TOKEN_BY_TOKEN = ("QK", "scaled", "capped", "biased", "masked", "exp", "A")


def trace(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="With --model: the text to trace; @FILE reads it from a file."
        ),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="A small layer of your own as JSON: X, W_Q, W_K, W_V, W_O, optional causal, "
            "mask, tokens.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Trace a head of this model on TEXT."),
    ] = None,
    layer: Annotated[int, typer.Option(help="With --model: the layer, counted from 0.")] = 0,
    head: Annotated[int, typer.Option(help="With --model: the head, counted from 0.")] = 0,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --model: read the text from FILE.")
    ] = None,
    device: Device = "cpu",
    lang: Language = None,
    json: Annotated[bool, typer.Option("--json", help="All numbers as JSON.")] = False,
) -> None:
    """Compute one attention layer step by step.

    Without arguments: a built-in example of three words, d_model = 4 and two heads, small enough to
    follow with a pencil.
    """
    from polyhead._utils.texts import language_of
    from polyhead.cli.terminal import console, print_json
    from polyhead.errors import InputError

    language = language_of(lang)
    if input is not None and model is not None:
        raise InputError("give --input or --model, not both")
    if model is None and (text is not None or file is not None):
        raise InputError("a text needs a model to trace: add --model MODEL, such as smollm2")
    if model is not None:
        result = _of_model(model, text, file, (layer, head), device, language)
    elif input is not None:
        result = _of_file(input, language)
    else:
        from polyhead.interpret.trace.steps import example_trace

        result = example_trace(language)
    if json:
        print_json(result.to_dict())
    else:
        show(result, console(), language)


def _of_file(path: Path, language: str) -> Trace:
    from polyhead._utils.texts import Texts
    from polyhead.cli.terminal import read_file
    from polyhead.interpret.trace.document import parse_trace_json
    from polyhead.interpret.trace.steps import trace_attention

    title = Texts(language, "trace")("title_file", name=path.name)
    return trace_attention(parse_trace_json(read_file(path), str(path)), title, language=language)


def _of_model(
    model: str,
    text: str | None,
    file: Path | None,
    place: tuple[int, int],
    device: str,
    language: str,
) -> Trace:
    from polyhead.cli.models import load_expecting
    from polyhead.cli.terminal import read_text

    content = read_text(text, file)
    from polyhead.generation import LanguageModel, TextEncoder

    loaded = load_expecting(model, "float32", LanguageModel, TextEncoder, device=device)
    from polyhead.interpret.heads import TokenizedText
    from polyhead.interpret.trace.model import trace_model

    tokens = TokenizedText.of(loaded.tokenizer, content)
    return trace_model(loaded, tokens.ids, *place, tokens.pieces, language=language)


def show(trace: Trace, screen: Console, language: str = "en") -> None:
    """Prints a trace step by step, a heading per head."""
    from rich.rule import Rule
    from rich.text import Text

    from polyhead._utils.texts import Texts

    said = Texts(language, "trace")

    screen.print(Text(trace.title, style="bold"))
    section = "head" if trace.steps[0].key == "X" else ""
    for step in trace.steps:
        part = step.key.partition(".")[0] if "." in step.key else "all heads"
        if part != section and step.key != "X":
            number = part.removeprefix("head")
            name = said("head", head=number) if number.isdecimal() else said("all_heads")
            screen.print()
            screen.print(Rule(Text(name, style="bold"), style="dim", align="left"))
            section = part
        screen.print()
        for line in _step_lines(step, trace.tokens, screen.width, said):
            line.rstrip()
            screen.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    for note in trace.notes:
        screen.print()
        screen.print(Text(note, style="dim"))


def _step_lines(step: TraceStep, tokens: tuple[str, ...], width: int, said: Texts) -> list[Text]:
    from rich.cells import cell_len
    from rich.text import Text

    shape = "[" + " × ".join(str(side) for side in step.shape) + "]"
    title = step.title.partition(": ")[2] or step.title
    heading = Text.assemble((step.formula, "bold"), "   ", (shape, "cyan"))
    lines = [heading]
    if heading.cell_len + 3 + cell_len(title) <= width:
        heading.append(f"   {title}", style="dim")
    else:
        lines.append(Text(title, style="dim"))
    lines += [Text("  ") + line for line in _drawing(step, tokens, width - 2)]
    working = _working(step, said)
    if working and cell_len(working) + 2 <= width:
        lines.append(Text(f"  {working}", style="dim"))
    return lines


def _drawing(step: TraceStep, tokens: tuple[str, ...], width: int) -> list[Text]:
    """The product written out where it fits, else the result alone, as many columns as fit."""
    from polyhead.cli.matrices import beside, matrix, width_of

    values = step.values.tolist()
    emphasise = step.key.endswith(".A")
    if step.factors is not None:
        left, right = (factor.tolist() for _, factor in step.factors)
        for most in (8, 5, 4, 3):
            drawn = beside(
                matrix(left, rows=tokens, most_columns=most),
                "·",
                matrix(right, most_columns=most),
                "=",
                matrix(values, most_columns=most, emphasise=emphasise),
            )
            if width_of(drawn) <= width:
                return drawn
    columns = tokens if step.key.rpartition(".")[2] in _TOKEN_BY_TOKEN else ()
    for most in (_MOST_TOKENS, 12, 10, 8, 6, 5, 4, 3):
        drawn = matrix(
            values,
            rows=tokens,
            columns=columns,
            most_rows=_MOST_TOKENS if columns else 8,
            most_columns=most,
            emphasise=emphasise,
        )
        if width_of(drawn) <= width:
            break
    return drawn


def _working(step: TraceStep, said: Texts) -> str:
    """The sum behind the first number, for products short enough to follow."""
    from polyhead.cli.matrices import number

    if step.factors is None:
        return ""
    terms = step.terms(0, 0)
    if len(terms) > _MOST_TERMS:
        return ""
    whole = all(a == int(a) and b == int(b) for a, b in terms)
    form = ".0f" if whole else ".3f"
    products = " + ".join(f"{number(a, form)}·{number(b, form)}" for a, b in terms)
    total = number(float(step.values[0, 0]), form)
    return said("first_number", sum=f"{products} = {total}")
