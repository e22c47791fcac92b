"""The table of verbs. Nothing heavier than typer is imported before a verb runs.

A verb's module is imported when the line names it: importing all of them took a third of the time
that the help of one takes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

VERBS = {
    "look": "look",
    "learn": "learn",
    "trace": "trace",
    "generate": "generate",
    "chat": "chat",
    "translate": "translate",
    "summarize": "translate",
    "transcribe": "translate",
    "train": "train",
    "perplexity": "perplexity",
    "convert": "convert",
    "quantize": "quantize",
    "plan": "plan",
    "bench": "bench",
    "serve": "serve",
    "batch": "batch",
    "route": "route",
    "doctor": "doctor",
    "cache": "cache",
    "compare": "compare",
}
"""Verbs in the order of the help, and the module of ``polyhead.cli`` that holds each."""

_HELP = ("--help", "-h")


def command(verbs: Collection[str] = tuple(VERBS)) -> Any:
    """The command ``polyhead`` with these verbs, default all."""
    app = typer.Typer(
        name="polyhead",
        help="Every kind of multi-head attention as one system.",
        no_args_is_help=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": list(_HELP)},
    )
    app.callback()(_root)
    for verb in verbs:
        module = import_module(f"polyhead.cli.{VERBS[verb]}")
        inner = getattr(module, f"{verb}_app", None)
        if inner is not None:
            for info in (inner.registered_callback, *inner.registered_commands):
                info.help = _reflowed(info.callback.__doc__)
            app.add_typer(inner, name=verb)
        else:
            run = getattr(module, verb)
            app.command(help=_reflowed(run.__doc__ or ""))(run)
    return typer.main.get_command(app)


def verbs_of(line: Sequence[str]) -> Collection[str]:
    """The verb that a line begins with, or all of them where it names none."""
    return line[:1] if line and line[0] in VERBS else tuple(VERBS)


def printed_help(line: Sequence[str]) -> bool:
    """Prints the help where the line is verbs and then ``--help``, and asks for nothing else.

    Typer would import its checks of arguments first, which help has none of.
    """
    words = list(line) or ["--help"]
    if words[-1] not in _HELP or any(word.startswith("-") for word in words[:-1]):
        return False
    found = command(verbs_of(words))
    context = typer.Context(found, info_name="polyhead", **found.context_settings)
    for word in words[:-1]:
        inner = found.get_command(context, word) if hasattr(found, "get_command") else None
        if inner is None:
            return False  # a word that is no verb: the line is run, and says so
        found = inner
        context = typer.Context(found, info_name=word, parent=context, **found.context_settings)
    words_of_help = found.get_help(context)
    if words_of_help:  # where rich is not there to print
        typer.echo(words_of_help)
    return True


def _print_version(wanted: bool) -> None:
    if wanted:
        from polyhead import __version__

        print(f"polyhead {__version__}")
        raise typer.Exit


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
