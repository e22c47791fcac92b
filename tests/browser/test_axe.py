"""axe-core finds nothing wrong with any view of the page, in both languages, themes and widths."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from browser.serving import Visit
from polyhead.viewer.page import PageData

pytestmark = pytest.mark.browser

Open = Callable[..., Any]

WAYS = [
    {"locale": "en-US", "color_scheme": "light", "viewport": {"width": 1600, "height": 900}},
    {"locale": "zh-CN", "color_scheme": "dark", "viewport": {"width": 390, "height": 800}},
]
"""Of reading: between them both languages, both themes and both widths."""
# Each way once in `make test`: one in the file, the other in the served page.
_SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


def violations(page: Any) -> list[str]:
    """What axe-core says, one line for each node; its rules of WCAG and of good practice."""
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary'][:200]}"
        for rule in found
        for node in rule["nodes"]
    ]


@pytest.fixture(autouse=True)
def axe() -> None:
    pytest.importorskip("axe_playwright_python")


@pytest.mark.parametrize("way", [_SLOW[0], WAYS[1]], ids=["en-light-wide", "zh-dark-narrow"])
def test_the_file_has_no_violations(
    open_page: Open, make_full: Callable[[], PageData], way: dict[str, Any]
) -> None:
    page = open_page(make_full(), "#1.1", reduced_motion="reduce", **way)
    assert violations(page) == []
    page.get_by_test_id("close").click()
    page.get_by_test_id("view-table").check()
    page.keyboard.press("?")
    assert violations(page) == []


@pytest.mark.parametrize("way", [WAYS[0], _SLOW[1]], ids=["en-light-wide", "zh-dark-narrow"])
def test_the_served_page_has_no_violations(visit: Visit, way: dict[str, Any]) -> None:
    page = visit("#1.1", reduced_motion="reduce", **way)
    page.get_by_test_id("compare").check()
    page.get_by_test_id("text-b").fill("Another text")
    page.get_by_test_id("look").click()
    page.evaluate("polyhead.ready")
    page.get_by_test_id("ablate").click()
    page.get_by_test_id("next-without-0").wait_for()
    page.evaluate("polyhead.settled()")
    assert violations(page) == []
