"""The site's own script and style: the reader's language first, a first column that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ASSETS = Path(__file__).parents[2] / "tools/theme/assets"
FAKE = "window.Worker = class { postMessage(message) { window.sent = message } };"


@pytest.mark.browser
@pytest.mark.parametrize(("language", "first"), [("en", "start.html"), ("zh", "zh/start.html")])
def test_search_puts_pages_in_the_readers_language_first(
    chromium: Any, language: str, first: str
) -> None:
    page = chromium.new_page()
    script = (ASSETS / "search.js").read_text(encoding="utf-8")
    page.set_content(f'<html lang="{language}"><script>{FAKE}</script><script>{script}</script>')
    docs = [{"location": "start.html"}, {"location": "zh/start.html"}]
    page.evaluate("docs => new Worker('').postMessage({type: 0, data: {docs}})", docs)
    sent = page.evaluate("window.sent.data.docs")
    assert [each["location"] for each in sent if each.get("boost", 1) > 1000] == [first]
    page.evaluate("new Worker('').postMessage({type: 2, data: 'query'})")
    assert page.evaluate("window.sent.data") == "query"
    page.close()


@pytest.mark.browser
def test_the_first_column_of_a_wide_table_stays_where_it_is(chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 600})
    cells = "".join(f"<td>column{n}column{n}</td>" for n in range(12))
    style = (ASSETS / "site.css").read_text(encoding="utf-8")
    page.set_content(
        f"<style>{style}</style><div class=md-typeset><div class=md-typeset__scrollwrap "
        "style='overflow-x:auto'><div class=md-typeset__table style='display:inline-block'>"
        f"<table><tr><td id=first>name</td>{cells}</tr></table></div></div></div>"
    )
    left = "document.getElementById('first').getBoundingClientRect().left"
    before = page.evaluate(left)
    page.evaluate("document.querySelector('.md-typeset__scrollwrap').scrollLeft = 300")
    assert page.evaluate("document.querySelector('.md-typeset__scrollwrap').scrollLeft") == 300
    assert page.evaluate(left) == pytest.approx(before, abs=3)  # the border of the table
    page.close()
