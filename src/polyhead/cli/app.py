"""The table of verbs. Nothing heavier than typer is imported before a verb runs."""

from __future__ import annotations

import inspect
import re
from typing import Annotated

import typer

from polyhead.cli.bench import bench
from polyhead.cli.chat import chat
from polyhead.cli.compare import compare_app
from polyhead.cli.convert import convert
from polyhead.cli.doctor import doctor
from polyhead.cli.generate import generate
from polyhead.cli.learn import learn
from polyhead.cli.look import look
from polyhead.cli.perplexity import perplexity
from polyhead.cli.plan import plan
from polyhead.cli.quantize import quantize
from polyhead.cli.trace import trace
from polyhead.cli.train import train
from polyhead.cli.translate import summarize, transcribe, translate

app = typer.Typer(
    name="polyhead",
    help="Every kind of multi-head attention as one system.",
    no_args_is_help=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from polyhead import __version__

        print(f"polyhead {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _reflowed(text: str) -> str:
    """Help is wrapped by the terminal's width, so single line breaks in a docstring are spaces."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text))


_VERBS = (
    look,
    learn,
    trace,
    generate,
    chat,
    translate,
    summarize,
    transcribe,
    train,
    perplexity,
    convert,
    quantize,
    plan,
    bench,
    doctor,
)
for verb in _VERBS:
    app.command(help=_reflowed(verb.__doc__ or ""))(verb)
app.add_typer(compare_app, name="compare")
