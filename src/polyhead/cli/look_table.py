"""What ``polyhead look`` says in the terminal or as JSON: tables of heads and of next tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyhead.cli.look_examine import Found
    from polyhead.inspection.finding import HeadLabel, HeadScores
    from polyhead.inspection.heads import HeadLook, Pair

_ROWS = 10
_BAR_CELLS = 10
_LABELLED = 8
"""Heads of one label that the table names; JSON has them all."""


def as_data(found: Found, place: Path | None, refusal: str | None) -> dict[str, Any]:
    """All that was found, for JSON.

    Args:
        found: What was found.
        place: Of the page or picture, if one was written.
        refusal: Why no page was written.
    """
    written = None
    if found.written is not None:
        written = asdict(found.written.stats) | {
            "text": found.written.text,
            "tokens_per_second": found.written.stats.tokens_per_second,
        }
    looks = [asdict(entry) for entry in found.looks]
    data = {
        "model": found.name,
        "text": found.tokens.text,
        "tokens": list(found.tokens.pieces),
        "continuation": written,
        "pair": asdict(found.pair),
        "heads": [{key: _number(value) for key, value in entry.items()} for entry in looks],
        "page": None if place is None else str(place),
        "no_page_because": refusal,
    }
    if found.scores is not None:
        data["labels"] = _labels_as_data(found.scores.labels())
    if found.next_tokens is not None:
        as_it_is, ablated = found.next_tokens
        data["next_tokens"] = {"as_it_is": as_it_is, "ablated": ablated}
    return data


def _number(value: float) -> float | None:
    return value if value == value else None  # NaN, of a text of one token, is no JSON


def show(found: Found) -> None:
    """Prints the next tokens without ablated heads, the heads of the pair, and the labels."""
    if found.next_tokens is not None:
        _show_next(*found.next_tokens)
    _show_pair(found.pair, found.remark)
    _show_heads(found.looks)
    if found.scores is not None:
        _show_labels(found.scores)


def _show_pair(pair: Pair, remark: str) -> None:
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


def _show_heads(looks: Sequence[HeadLook]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from polyhead.cli.terminal import console

    screen = console()
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


def _show_labels(scores: HeadScores) -> None:
    """Prints the heads of each label, the highest scores first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from polyhead.cli.encoding import plain
    from polyhead.cli.terminal import console
    from polyhead.inspection.finding import CRITERIA

    texts = len(scores.by_text["sink"])
    labels = scores.labels()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="")
    for heading in ("label", "heads", "best (layer.head score)"):
        table.add_column(heading, justify="right" if heading == "heads" else "left")
    for label in scores.by_text:
        found = [entry for entry in labels if entry.label == label]
        several = len(scores.by_text[label]) > 1
        best = ", ".join(
            f"{e.layer}.{e.head} {e.score:.2f}" + (f" ± {e.spread:.2f}" if several else "")
            for e in found[:_LABELLED]
        )
        more = ", …" if len(found) > _LABELLED else ""
        criterion = f"{label} ≥ {CRITERIA[label].threshold}"
        table.add_row(plain(criterion), str(len(found)), plain(best + more))
    screen = console()
    screen.print(Text(f"\nWhat the heads do, over {texts} text{'s' if texts > 1 else ''}", "bold"))
    screen.print(table)
    if texts > 1:
        screen.print(Text("± is the standard deviation over the texts.", style="dim"))


def _labels_as_data(labels: Sequence[HeadLabel]) -> list[dict[str, Any]]:
    """All labels with their scores, thresholds and where the thresholds come from."""
    from polyhead.inspection.finding import CRITERIA

    return [
        asdict(entry)
        | {
            "threshold": CRITERIA[entry.label].threshold,
            "what": CRITERIA[entry.label].score,
            "source": CRITERIA[entry.label].source,
        }
        for entry in labels
    ]


def _show_next(before: Sequence[tuple[str, float]], after: Sequence[tuple[str, float]]) -> None:
    """Prints the likeliest next tokens with and without the ablated heads."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from polyhead.cli.terminal import console

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="")
    table.add_column("next token")
    for heading in ("as it is", "ablated"):
        table.add_column(heading, justify="right")
    shares = dict(before), dict(after)
    for token in dict.fromkeys([*shares[0], *shares[1]]):
        cells = [f"{found[token]:.3f}" if token in found else "" for found in shares]
        table.add_row(Text(repr(token)), *cells)
    console().print(table)
