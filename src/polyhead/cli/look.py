"""``polyhead look``: every head of a real model on a text, in the terminal and as a page."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyhead.generation import Generation, LanguageModel, TextEncoder
    from polyhead.inspection.heads import HeadLook, Pair, TokenizedText
    from polyhead.inspection.probe import Probe

_DEMO_PAIR = ("it", "animal")
_ROWS = 10
_BAR_CELLS = 10
_ECHO = 400
"""Characters of the prompt that are shown before its continuation."""


def look(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="The text; @FILE reads it from a file, - from standard input."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A known name, a Hugging Face directory, a .gguf file or a hub id.",
        ),
    ] = "smollm2",
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the text from this file.")
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="The word that looks (its last occurrence).")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The word that is looked at.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page is written.")
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
    from polyhead.cli.terminal import print_json, progress, read_text
    from polyhead.errors import InputError

    if (query is None) != (key is None):
        raise InputError("give --query and --key together, or neither")
    chosen = None if layers is None else parse_layers(layers)
    content = read_text(text, file)
    if page:
        check_writable(out)
    loaded = load_any(model, dtype)

    from polyhead.generation import LanguageModel
    from polyhead.inspection.heads import TokenizedText, rank_heads

    tokens = TokenizedText.of(loaded.tokenizer, content)
    written = None
    if isinstance(loaded, LanguageModel) and max_new_tokens != 0:
        written = _continue(loaded, content, max_new_tokens, show=not json)
    with progress("looking at every head") as advance:
        seen = _watch(loaded, tokens)
        for number, view in enumerate(seen):
            advance("looking at every head", number, len(seen))
            view.summary()
        pair, remark = _choose_pair(seen, tokens, query, key, loaded.config.kind == "decoder")
        looks = rank_heads(seen, pair)
        if chosen is not None:
            looks = [entry for entry in looks if entry.layer in _checked(chosen, seen)]
    refusal = _write_page(out, model, loaded, seen, tokens, pair, written) if page else None
    place = out.resolve() if page and refusal is None else None
    if json:
        print_json(_as_data(model, tokens, pair, looks, written, place, refusal))
        return
    _show(tokens, pair, remark, looks)
    if place is not None:
        print(f"\nThe page with all heads: {place}")
    elif refusal is not None:
        print(f"\nNo page was written: {refusal}")


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


def check_writable(out: Path) -> None:
    """Says at once, before a model is loaded, that the page cannot be written.

    Raises:
        OSError: with the path and the reason.
    """
    import errno

    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
    parent = out.parent
    if not parent.exists():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(parent))
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


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


def _watch(model: LanguageModel | TextEncoder, tokens: TokenizedText) -> Probe:
    """One pass over the text with a probe on every layer."""
    import torch

    from polyhead.inspection.probe import probe

    device = next(model.parameters()).device
    with probe(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens.ids], device=device))
    return seen


def _choose_pair(
    seen: Probe, tokens: TokenizedText, query: str | None, key: str | None, causal: bool
) -> tuple[Pair, str]:
    """The pair to show, and why it was chosen where the user did not say."""
    from polyhead.inspection.heads import find_pair, strongest_pair

    if query is not None and key is not None:
        return find_pair(tokens, query, key, causal=causal), ""
    words = [tokens.find(word, whole=True) for word in _DEMO_PAIR]
    if all(words) and (not causal or words[1][0][0] < words[0][-1][-1]):
        return find_pair(tokens, *_DEMO_PAIR, causal=causal), ""
    pair = strongest_pair(seen, tokens)
    return pair, "Chosen by itself: where the last word looks most (or give --query and --key)."


def _write_page(
    out: Path,
    name: str,
    model: LanguageModel | TextEncoder,
    seen: Probe,
    tokens: TokenizedText,
    pair: Pair,
    written: Generation | None,
) -> str | None:
    """Writes the page; returns why not where the text is too long for one."""
    import torch

    from polyhead.cli.terminal import progress
    from polyhead.inspection.page import FLOAT16_BYTES, PageData, write

    views = list(seen)
    length = len(tokens.ids)
    heads = views[0].q.shape[1]
    stored = length * (length + 1) // 2 if model.config.kind == "decoder" else length**2
    if any(view.q.shape[1] != heads for view in views):
        return "its layers differ in their number of heads"
    if len(views) * heads * stored * 2 > FLOAT16_BYTES:
        return (
            f"{length:,} tokens × {len(views)} layers × {heads} heads are too many weights for one "
            "page; shorten the text"
        )
    with progress("writing the page") as advance:
        weights = torch.empty(len(views), heads, length, length)
        for layer, view in enumerate(views):
            advance("writing the page", layer, len(views))
            weights[layer] = view.rows()[0]
        data = PageData(
            title=tokens.text,
            model=name,
            tokens=tokens.pieces,
            weights=weights.numpy(),
            num_kv_heads=[view.k.shape[1] for view in views],
            continuation="" if written is None else written.text,
            facts=_facts(model, written),
            focus=(pair.query, pair.keys[-1]),
        )
        try:
            write(data, out)
        except OSError as error:
            # The name in the error is that of a draft beside the page.
            raise OSError(error.errno, error.strerror or str(error), str(out)) from error
    return None


def _facts(model: LanguageModel | TextEncoder, written: Generation | None) -> dict[str, str]:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    facts = {"weights": dtype}
    if written is not None:
        stats = written.stats
        if stats.tokens_per_second is not None:
            facts["speed"] = f"{stats.tokens_per_second:.1f} tokens/s"
        facts["KV cache"] = f"{stats.cache_used_bytes:,} bytes for {stats.cache_tokens} tokens"
    return facts


def _as_data(
    model: str,
    tokens: TokenizedText,
    pair: Pair,
    looks: Sequence[HeadLook],
    written: Generation | None,
    place: Path | None,
    refusal: str | None,
) -> dict[str, Any]:
    generation = None
    if written is not None:
        generation = asdict(written.stats) | {
            "text": written.text,
            "tokens_per_second": written.stats.tokens_per_second,
        }
    return {
        "model": model,
        "text": tokens.text,
        "tokens": list(tokens.pieces),
        "continuation": generation,
        "pair": asdict(pair),
        "heads": [{key: _number(value) for key, value in asdict(entry).items()} for entry in looks],
        "page": None if place is None else str(place),
        "no_page_because": refusal,
    }


def _number(value: float) -> float | None:
    return value if value == value else None  # NaN, of a text of one token, is no JSON


def _show(tokens: TokenizedText, pair: Pair, remark: str, looks: Sequence[HeadLook]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from polyhead.cli.terminal import console

    screen = console()
    keys = ", ".join(str(key) for key in pair.keys)
    plural = "s" if len(pair.keys) > 1 else ""
    title = Text.assemble(
        ("\nHeads that look from ", "bold"),
        (repr(pair.query_word), "bold cyan"),
        f" (token {pair.query}) ",
        ("to ", "bold"),
        (repr(pair.key_word), "bold cyan"),
        f" (token{plural} {keys})",
    )
    screen.print(title)
    if remark:
        screen.print(Text(remark, style="dim"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="")
    for heading in ("layer", "head", "weight", ""):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for heading in ("entropy", "on first", "on previous"):
        table.add_column(heading, justify="right", no_wrap=True, style="dim")
    strongest = max((entry.weight for entry in looks), default=0.0) or 1.0
    for entry in looks[:_ROWS]:
        bar = "█" * round(_BAR_CELLS * entry.weight / strongest)
        table.add_row(
            str(entry.layer),
            str(entry.head),
            f"{entry.weight:.3f}",
            Text(bar.ljust(_BAR_CELLS), style="cyan"),
            f"{entry.entropy:.2f}",
            f"{entry.first_token:.3f}",
            f"{entry.previous_token:.3f}",
        )
    screen.print(table)
    screen.print(
        Text(
            f"{min(_ROWS, len(looks))} of {len(looks)} heads. weight: of this one row. entropy "
            "(nats) and shares on the first and the previous token: means over the whole text.",
            style="dim",
        )
    )
