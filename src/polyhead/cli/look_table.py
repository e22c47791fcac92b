"""What ``polyhead look`` says in the terminal or as JSON: tables of heads and of next tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from polyhead._utils.texts import Texts
from polyhead._utils.texts.labels import head_name, isolated, label, visible
from polyhead.cli.encoding import plain
from polyhead.cli.terminal import console, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyhead.cli.look_examine import Found
    from polyhead.interpret.finding import HeadLabel, HeadScores
    from polyhead.interpret.heads import HeadLook, WordPair

_ROWS = 10
_BAR_CELLS = 10
_LABELLED = 8
"""Heads of one label that the table names; JSON has them all."""


def as_data(found: Found, place: Path | None, refusal: str | None) -> dict[str, Any]:
    """All that was found, for JSON.

    Args:
        place: Path of the page or picture, if one was written.
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
    return value if value == value else None  # a text of one token has NaN, which JSON lacks


def show(found: Found, language: str = "en") -> None:
    """Prints the next tokens without ablated heads, the heads of the pair, and the labels."""
    said = Texts(language, "look")
    if found.next_tokens is not None:
        _show_next(*found.next_tokens, said)
    _show_pair(found.pair, said("chosen") if found.chosen else "", said)
    _show_heads(found.looks, said)
    if found.scores is not None:
        _show_labels(found.scores, said)


def _show_pair(pair: WordPair, remark: str, said: Texts) -> None:
    screen = console()
    keys = ", ".join(str(key) for key in pair.keys)
    plural = "keys" if len(pair.keys) > 1 else "key"
    words = {"query": _quoted(pair.query_word), "key": _quoted(pair.key_word)}
    at = {"query_at": said("key_at", keys=pair.query), "key_at": said(f"{plural}_at", keys=keys)}
    title = Text("\n" + said("title", **words, **at), style="bold")
    title.highlight_words(words.values(), "cyan")
    screen.print(title)
    if remark:
        screen.print(Text(remark, style="dim"))


def _quoted(word: str) -> str:
    return f"'{isolated(label(word))}'"


def _show_heads(looks: Sequence[HeadLook], said: Texts) -> None:
    screen = console()
    table = plain_table()
    for heading in ("head", "weight", ""):
        name = said(heading) if heading else ""
        table.add_column(name, justify="right" if heading else "left", no_wrap=True)
    named = Texts(said.language, "statistics")
    for name in ("entropy", "first_token", "previous_token"):
        table.add_column(named(f"stat.{name}"), justify="right", no_wrap=True, style="dim")
    strongest = max((entry.weight for entry in looks), default=0.0) or 1.0
    for entry in looks[:_ROWS]:
        bar = "█" * round(_BAR_CELLS * entry.weight / strongest)
        table.add_row(
            head_name(entry.layer, entry.head),
            f"{entry.weight:.3f}",
            Text(bar.ljust(_BAR_CELLS), style="cyan"),
            f"{entry.entropy:.2f}",
            f"{entry.first_token:.3f}",
            f"{entry.previous_token:.3f}",
        )
    screen.print(table)
    screen.print(Text(said("heads_of", some=min(_ROWS, len(looks)), all=len(looks)), style="dim"))


def _show_labels(scores: HeadScores, said: Texts) -> None:
    """Prints the heads of each label, the highest scores first."""
    from polyhead.interpret.finding import CRITERIA

    texts = len(scores.by_text["sink"])
    labels = scores.labels()
    headings = [said(heading) for heading in ("label", "heads", "best")]
    table = plain_table(*headings, right=headings[1:2])
    for name, by_text in scores.by_text.items():
        found = [entry for entry in labels if entry.label == name]
        several = len(by_text) > 1
        best = ", ".join(
            f"{head_name(e.layer, e.head)} {e.score:.2f}"
            + (f" ± {e.spread:.2f}" if several else "")
            for e in found[:_LABELLED]
        )
        more = ", …" if len(found) > _LABELLED else ""
        criterion = f"{name} ≥ {CRITERIA[name].threshold}"
        table.add_row(plain(criterion), str(len(found)), plain(best + more))
    screen = console()
    screen.print(
        Text("\n" + said("labels_many" if texts > 1 else "labels_one", texts=texts), "bold")
    )
    screen.print(table)
    if texts > 1:
        screen.print(Text(said("spread"), style="dim"))


def _labels_as_data(labels: Sequence[HeadLabel]) -> list[dict[str, Any]]:
    """All labels with their scores, thresholds and where the thresholds come from."""
    from polyhead.interpret.finding import CRITERIA

    return [
        asdict(entry)
        | {
            "threshold": CRITERIA[entry.label].threshold,
            "what": CRITERIA[entry.label].score,
            "source": CRITERIA[entry.label].source,
        }
        for entry in labels
    ]


def _show_next(
    before: Sequence[tuple[str, float]], after: Sequence[tuple[str, float]], said: Texts
) -> None:
    """Prints the likeliest next tokens with and without the ablated heads."""
    headings = [said(heading) for heading in ("next", "as_it_is", "ablated")]
    table = plain_table(*headings, right=headings[1:])
    probabilities = dict(before), dict(after)
    for token in dict.fromkeys([*probabilities[0], *probabilities[1]]):
        cells = [f"{found[token]:.3f}" if token in found else "" for found in probabilities]
        table.add_row(Text(isolated(plain(visible(token)))), *cells)
    console().print(table)
