"""``polyhead learn``: the lesson, written as one file and opened in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.options import Language


def learn(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write the lesson to.")
    ] = Path("polyhead-lesson.html"),
    lang: Language = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
) -> None:
    """Learn multi-head attention: twelve scenes with numbers that you can change.

    One HTML file without network: query, key and value; scores and softmax; an example worked
    step by step; several heads; masks; positions; cross-attention; MHA, GQA, MQA and MLA with their
    caches; FlashAttention; training; the stack of layers; the variants compared. Beside them stand
    the numbers of a real model.
    """
    import webbrowser

    from polyhead._utils.texts import Texts, language_of
    from polyhead.cli.look_files import check_writable
    from polyhead.cli.terminal import progress

    said = Texts(language_of(lang), "learn")
    check_writable(out)
    with progress(said("writing")):
        from polyhead.viewer.lesson import write

        write(out, lang)
    print(said("written", place=out.resolve()))
    if open_ and not webbrowser.open(out.resolve().as_uri()):
        print(said("not_opened"))
