"""Who may use the served page, and how: the token, the keyboard, tabs, themes, hostile text."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest
import torch

import polyhead as ph
from browser.contrast import TEXT_COLOURS, contrast
from browser.serving import HANG, TOKEN, Visit, map_of, open_head, text_of, weights_of

pytestmark = pytest.mark.browser


def test_an_empty_page_says_what_it_is_for_and_control_enter_looks(visit: Visit) -> None:
    page = visit()
    assert not page.get_by_text("Nothing leaves this machine").is_visible()
    page.get_by_test_id("text").fill("four")
    page.keyboard.press("Control+Enter")
    page.evaluate("polyhead.ready")
    assert "4 tokens" in text_of(page, "asking-note")
    page.evaluate("document.body.classList.add('is-empty')")
    assert page.get_by_text("Nothing leaves this machine").is_visible()


def test_everything_is_done_with_the_keyboard(visit: Visit) -> None:
    page = visit()
    page.get_by_test_id("head-0.0").focus()
    for key, name in [("ArrowRight", "0.1"), ("ArrowDown", "1.1"), ("End", "1.3")]:
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.testid") == f"head-{name}"
    page.keyboard.press("Enter")
    assert text_of(page, "panel-title") == "Head 1.3"
    visited = {page.evaluate("document.activeElement.dataset.testid")}
    for _ in range(40):
        page.keyboard.press("Tab")
        visited.add(page.evaluate("document.activeElement.dataset.testid ?? null"))
    wanted = {"heatmap", "copy-csv", "keep", "temperature", "top-k", "draw-token", "write"}
    assert wanted | {"save-png", "save-svg", "save-csv", "save-page"} <= visited
    page.get_by_test_id("ablate").focus()
    page.keyboard.press("Enter")
    page.get_by_text("without 1.3").wait_for()
    page.keyboard.press("Escape")
    assert not page.get_by_test_id("panel").is_visible()


def test_nobody_enters_without_the_token_or_by_another_name(address: str) -> None:
    def answer(path: str, **headers: str) -> int:
        request = urllib.request.Request(address + path, headers=headers)
        try:
            return int(urllib.request.urlopen(request, timeout=HANG / 1000).status)
        except urllib.error.HTTPError as error:
            return error.code

    assert answer(f"{TOKEN}/") == 200
    for path in ("", "wrong/", f"{TOKEN}x/", f"x/{TOKEN}/", "wrong/page/1", "wrong/look"):
        assert answer(path) == 404, path
    assert answer(f"{TOKEN}/asset/../server.py") == 404
    assert answer(f"{TOKEN}/", Host="evil.example") == 400
    assert answer(f"{TOKEN}/region/1/0/0?q0=-1") in (400, 404)
    assert answer(f"{TOKEN}/thumbnails/999/0") == 400


@pytest.mark.slow
def test_pasting_ten_megabytes_is_answered_by_a_sentence(visit: Visit) -> None:
    page = visit(expected="400 (Bad Request)")
    page.evaluate("document.querySelector('#text-0').value = 'word '.repeat(2_000_000)")
    page.get_by_test_id("look").click()
    page.evaluate("polyhead.ready")
    assert re.search(r"context.*96", text_of(page, "status"))
    page.get_by_test_id("text").fill("short again")
    page.get_by_test_id("look").click()
    page.evaluate("polyhead.ready")
    assert not page.get_by_test_id("status").is_visible()
    assert "11 tokens" in text_of(page, "asking-note")


def test_two_tabs_at_once_see_their_own_texts(visit: Visit, model: ph.LanguageModel) -> None:
    pages = [visit(), visit()]
    texts = ["The first tab", "The second, longer tab"]
    for page, text in zip(pages, texts, strict=True):
        page.get_by_test_id("text").fill(text)
    for page in pages:
        page.get_by_test_id("look").click()
    for page, text in zip(pages, texts, strict=True):
        page.evaluate("polyhead.ready")
        open_head(page, "1.3")
        torch.testing.assert_close(map_of(page), weights_of(model, text)[0][1, 3])


def test_hostile_text_is_shown_and_never_run(visit: Visit) -> None:
    page = visit()
    page.get_by_test_id("text").fill("</script><img src=x onerror=alert(1)>")
    page.get_by_test_id("look").click()
    page.evaluate("polyhead.ready")
    open_head(page, "0.0")
    assert page.evaluate("document.images.length") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_text_can_be_read_in_both_themes_and_narrow_windows(
    visit: Visit, theme: str, width: int
) -> None:
    page = visit("#0.0", color_scheme=theme, viewport={"width": width, "height": 800})
    for words, ink, ground in page.evaluate(TEXT_COLOURS):
        assert contrast(ink, ground) >= 4.5, words
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_test_id("theme").click()
    other = page.evaluate("document.documentElement.dataset.theme")
    assert other == {"light": "dark", "dark": "light"}[theme]


@pytest.mark.slow
def test_the_served_page_speaks_chinese_and_changes_its_language(visit: Visit) -> None:
    page = visit("#1.1", locale="zh-CN")
    assert text_of(page, "panel-title") == "头 1.1"
    assert text_of(page, "shown") == "8 个头"
    assert "30 个词元" in text_of(page, "asking-note")
    assert "可以先看什么" in text_of(page, "notable")
    page.get_by_test_id("ablate").click()
    page.get_by_text("去掉 1.1").wait_for()
    page.get_by_test_id("language").select_option("en")
    assert text_of(page, "panel-title") == "Head 1.1"
    assert text_of(page, "shown") == "8 heads"
    assert "without 1.1" in text_of(page, "ablated")
    empty = page.evaluate("""[...document.querySelectorAll("[data-t]")]
        .filter((node) => !node.textContent).map((node) => node.dataset.t)""")
    assert empty == []
