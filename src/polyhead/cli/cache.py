"""``polyhead cache``: what polyhead keeps in the user's cache directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli import options

if TYPE_CHECKING:
    from polyhead.checkpoints import CachedFile

cache_app = typer.Typer()

_KINDS = {
    "joined": "joined from parts",
    "converted": "copy of an earlier version, unused",
    "unfinished": "left by a killed process",
}


@cache_app.callback(invoke_without_command=True)
def cache(context: typer.Context, json: options.Json = False) -> None:
    """List what polyhead keeps in the cache directory: model, kind, size, last use.

    Models of packages and of the Hugging Face hub lie elsewhere: pip and the hub's own tool remove
    them.

    Example: polyhead cache clear gemma3-270m
    """
    if context.invoked_subcommand is not None:
        return
    from polyhead.checkpoints import cache_directory, cached_files
    from polyhead.cli.terminal import console, plain_table, print_json

    found, folder = cached_files(), cache_directory()
    if json:
        print_json({"directory": str(folder), "files": [_as_data(each) for each in found]})
        return
    screen = console()
    if found:
        table = plain_table("model", "kind", "size", "last used", right=["size"])
        for each in found:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
            table.add_row(_model(each), _KINDS[each.kind], _megabytes([each]), used)
        screen.print(table)
    total = f"{_megabytes(found)} in {folder}" if found else f"nothing is kept in {folder}"
    screen.print(total, soft_wrap=True)


@cache_app.command("clear")
def clear(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A model of the list; default: everything in it."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Remove what polyhead keeps: everything, or what it keeps of one model.

    What is needed again is made again. Other files in the cache directory stay, links are not
    followed, and a process that uses a file keeps its numbers.

    Example: polyhead cache clear gemma3-270m
    """
    import warnings

    from polyhead.checkpoints import cached_files
    from polyhead.cli.terminal import console, print_json
    from polyhead.errors import InputError

    every = cached_files()
    chosen = [each for each in every if name in (None, _model(each))]
    if name is not None and not chosen:
        names = ", ".join(dict.fromkeys(map(_model, every))) or "nothing"
        raise InputError(f"nothing is kept of {name!r}: the cache directory holds {names}")
    gone = [each for each in chosen if each.remove()]
    for each in chosen:
        if each not in gone:
            warnings.warn(f"{each.path} cannot be removed", stacklevel=2)
    if json:
        print_json({"removed": [_as_data(each) for each in gone]})
        return
    screen = console()
    for each in gone:
        screen.print(f"removed {each.path}", soft_wrap=True)
    screen.print(f"{_megabytes(gone)} freed")


def _model(each: CachedFile) -> str:
    """The known name of the model that a file belongs to, or the file's own."""
    from polyhead.checkpoints.catalogue import KNOWN_MODELS

    names = {Path(known.file).stem.removesuffix(".gguf"): known.name for known in KNOWN_MODELS}
    return names.get(each.name, each.name)


def _megabytes(files: list[CachedFile]) -> str:
    return f"{sum(each.num_bytes for each in files) / 1e6:,.1f} MB"


def _as_data(each: CachedFile) -> dict[str, object]:
    return {
        "model": _model(each),
        "kind": each.kind,
        "bytes": each.num_bytes,
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each.used)),
        "path": str(each.path),
    }
