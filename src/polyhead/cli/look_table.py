"""What ``polyhead look`` says in the terminal or as JSON: tables of heads and of next tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.text import Text

from polyhead._utils.texts import Texts
from polyhead._utils.texts.labels import head_name, isolated, label, visible
from polyhead.cli.encoding import plain
from polyhead.cli.terminal import console, plain_table
from polyhead.interpret.habits import SHORTEST
from polyhead.interpret.standing_out import ALLOWED
from polyhead.viewer.notable import place_of, say_habit, say_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from polyhead.cli.look_examine import Found
    from polyhead.interpret.finding import HeadLabel, HeadScores
    from polyhead.interpret.heads import HeadLook, WordPair

_ROWS = 10
_FEW = 3
_NUMBER = 5
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
    said = Texts("en", "statistics")
    standing, pieces = found.findings.standing, found.tokens.pieces
    data = {
        "model": found.name,
        "text": found.tokens.text,
        "tokens": list(found.tokens.pieces),
        "continuation": written,
        "pair": asdict(found.pair),
        "heads": [_head(entry, *found.controls[entry.layer, entry.head]) for entry in found.looks],
        "standing_out": {
            "threshold": standing.threshold,
            "rate": standing.rate,
            "rate_in_shuffles": ALLOWED,
            "shuffles": standing.shuffles,
            "pairs": [
                asdict(pair) | {"times": pair.times, "sentence": say_pair(pair, pieces, said)}
                for pair in standing.found()
            ],
        },
        "habits": [
            asdict(each) | {"sentence": say_habit(each, said)} for each in found.findings.habits
        ],
        "page": None if place is None else str(place),
        "no_page_because": refusal,
    }
    if found.scores is not None:
        data["labels"] = _labels_as_data(found.scores.labels())
    if found.next_tokens is not None:
        as_it_is, ablated = found.next_tokens
        data["next_tokens"] = {"as_it_is": as_it_is, "ablated": ablated}
    return data


def _head(entry: HeadLook, shuffled: float | None, others: float) -> dict[str, float | None]:
    numbers = asdict(entry) | {"shuffled": shuffled, "others": others}
    # A text of one token has NaN, which JSON lacks.
    return {key: value if value == value else None for key, value in numbers.items()}


def show(found: Found, language: str = "en") -> None:
    """Prints next tokens without ablated heads, what stands out or the pair, habits and labels."""
    said = Texts(language, "look")
    if found.next_tokens is not None:
        _show_next(*found.next_tokens, said)
    if found.chosen:
        _show_standing(found, said)
    else:
        _show_pair(found.pair, said)
        _show_heads(found, said)
    _show_habits(found, said)
    if found.scores is not None:
        _show_labels(found.scores, said)


def _show_standing(found: Found, said: Texts) -> None:
    """The pairs that stand out; where there are none, the strongest and a warning."""
    standing, pieces = found.findings.standing, found.tokens.pieces
    layers = {entry.layer for entry in found.looks}
    pairs = [pair for pair in standing.found() if pair.layer in layers]
    screen = console()
    if not standing.pairs:
        screen.print(Text("\n" + said("standing_short"), style="dim"))
        return
    heading = "standing" if found.findings.more else "standing_none"
    screen.print(Text("\n" + said(heading), style="bold"))
    table = plain_table()
    for heading in ("head", "from_to", "weight", "by_distance", "shuffled", "others", "habit"):
        _add_column(table, said(heading), right=heading not in ("from_to", "habit"))
    habits = _habits(found, said)
    for pair in (pairs or standing.pairs[:_FEW])[:_ROWS]:
        way = f"{isolated(label(pieces[pair.query]))} → {isolated(label(pieces[pair.key]))}"
        numbers = pair.weight, pair.by_distance, pair.shuffled, pair.others
        head = pair.layer, pair.head
        table.add_row(
            head_name(*head), Text(plain(way), "cyan"), *map(_number, numbers), habits[head]
        )
    screen.print(table)
    rate = f"{100 * standing.rate:.1f}"
    screen.print(Text(said("standing_note", shuffles=standing.shuffles, rate=rate), style="dim"))


def _add_column(table: Table, name: str, *, right: bool) -> None:
    """A column of numbers that is never cut, or of words that may wrap."""
    width = max(_NUMBER, cell_len(name)) if right else None
    table.add_column(name, justify="right" if right else "left", no_wrap=right, min_width=width)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _habits(found: Found, said: Texts) -> dict[tuple[int, int], Text]:
    """What each head attends to mostly, with its share."""
    named = Texts(said.language, "statistics")
    return {
        (each.layer, each.head): Text(
            named("habit.none")
            if each.kind is None
            else f"{place_of(each.nearest, each.distance, named)} {each.share:.2f}",
            style="dim",
        )
        for each in found.findings.habits
    }


def _show_pair(pair: WordPair, said: Texts) -> None:
    keys = ", ".join(str(key) for key in pair.keys)
    plural = "keys" if len(pair.keys) > 1 else "key"
    words = {"query": _quoted(pair.query_word), "key": _quoted(pair.key_word)}
    at = {"query_at": said("key_at", keys=pair.query), "key_at": said(f"{plural}_at", keys=keys)}
    title = Text("\n" + said("title", **words, **at), style="bold")
    title.highlight_words(words.values(), "cyan")
    console().print(title)


def _quoted(word: str) -> str:
    return f"'{isolated(label(word))}'"


def _show_heads(found: Found, said: Texts) -> None:
    """The heads with the largest weights along the pair, beside the controls."""
    screen, looks = console(), found.looks
    table = plain_table()
    for heading in ("head", "weight", "", "shuffled", "others", "habit"):
        name = said(heading) if heading else ""
        _add_column(table, name, right=heading not in ("", "habit"))
    habits = _habits(found, said)
    strongest = max((entry.weight for entry in looks), default=0.0) or 1.0
    for entry in looks[:_ROWS]:
        head = entry.layer, entry.head
        bar = "█" * round(_BAR_CELLS * entry.weight / strongest)
        table.add_row(
            head_name(*head),
            f"{entry.weight:.3f}",
            Text(bar.ljust(_BAR_CELLS), style="cyan"),
            *map(_number, found.controls[head]),
            habits[head],
        )
    screen.print(table)
    screen.print(Text(said("pair_note", some=min(_ROWS, len(looks)), all=len(looks)), style="dim"))


def _show_habits(found: Found, said: Texts) -> None:
    """How many heads have each habit, and which most."""
    headings = [said(heading) for heading in ("habit", "heads", "most", "even", "shuffled")]
    table = plain_table(*headings, right=(headings[1], *headings[3:]))
    named = Texts(said.language, "statistics")
    layers = {entry.layer for entry in found.looks}
    kinds = found.findings.by_kind()
    if len(found.tokens.ids) < SHORTEST:
        return
    count = 0
    for kind, every in kinds.items():
        heads = [habit for habit in every if habit.layer in layers]
        if not heads:
            continue
        count += len(heads)
        most = " · ".join(f"{head_name(e.layer, e.head)} {e.share:.2f}" for e in heads[:_FEW])
        beside = [e.shuffled for e in heads if e.shuffled is not None]
        means = _mean([e.even for e in heads]), _mean(beside)
        places = {place_of(kind, e.distance, named) for e in heads}
        place = places.pop() if len(places) == 1 else said("one_distance")
        table.add_row(place, str(len(heads)), most, *means)
    rest = sum(habit.layer in layers for habit in found.findings.habits) - count
    table.add_row(named("habit.none"), str(rest), "", "", "")
    screen = console()
    screen.print(Text("\n" + said("habits"), style="bold"))
    screen.print(table)
    screen.print(Text(said("habits_note"), style="dim"))


def _mean(numbers: Sequence[float]) -> str:
    return _number(sum(numbers) / len(numbers) if numbers else None)


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
