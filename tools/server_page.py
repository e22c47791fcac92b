"""Writes the tables of options in docs/server.md: ``python tools/server_page.py``."""

from __future__ import annotations

import json
from pathlib import Path

from polyhead.serving.http.options import TABLES, Option

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
_FIRST, _LAST = "<!-- options -->\n", "<!-- end of options -->\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(text), encoding="utf-8")


def with_tables(page: str) -> str:
    """The page with the tables of today."""
    before, _, rest = page.partition(_FIRST)
    _, _, after = rest.partition(_LAST)
    return f"{before}{_FIRST}\n{tables()}\n{_LAST}{after}"


def tables() -> str:
    """Options of texts in one table, those of the other addresses in one each."""
    (_, chat), (_, completions), *others = TABLES.items()
    rows = []
    for name in dict.fromkeys([*chat, *completions]):
        one, other = chat.get(name), completions.get(name)
        if one == other and one is not None:
            rows.append(_row(name, one, "both"))
        else:
            found = ((one, "chat"), (other, "completions"))
            rows += [_row(name, option, place) for option, place in found if option is not None]
    made = [("| chat and completions | for | | |", "|---|---|---|---|", rows)]
    made += [
        (f"| `{path}` | | |", "|---|---|---|", [_row(*each) for each in table.items()])
        for path, table in others
    ]
    return "\n\n".join("\n".join((head, line, *rows)) for head, line, rows in made)


def _row(name: str, option: Option, place: str = "") -> str:
    where = f" | {place}" if place else ""
    return f"| `{name}`{where} | {state(option)} | {option.note} |"


def state(option: Option) -> str:
    """Whether an option works."""
    if option.read is not None:
        return "works" if option.effect else "no effect"
    values = " or ".join(f"`{json.dumps(value)}`" for value in option.neutral)
    return f"refused, except {values}" if values else "refused"


if __name__ == "__main__":
    main()
