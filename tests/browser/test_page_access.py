"""The page for every hand and eye: keyboard, themes, contrast, narrow windows, hostile text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from browser.contrast import TEXT_COLOURS, contrast
from polyhead.viewer.page import PageData

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Make = Callable[..., PageData]

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\u2028",
    "\n",
    "\"'`",
    "\u202eabc",
    "😀",
    " 漢字",
    "\ufffd",
    "\udc80",
    "",
    "  ",
    "\x00",
    "&lt;",
    "{{data}}",
    "a" * 400,
]


def focused(page: Any) -> str | None:
    return page.evaluate("document.activeElement.dataset.testid ?? null")


def test_everything_is_reached_with_the_keyboard_alone(open_page: Open, make_data: Make) -> None:
    data = make_data()
    page = open_page(data, "#0.0")
    press = page.keyboard.press
    visited = []
    for _ in range(60):
        press("Tab")
        visited.append(focused(page))
    wanted = {"theme", "help", "view-maps", "order-layer", "measure", "direction", "pair-query",
              "pair-key", "scale-sqrt", "hide-first", "head-0.0", "previous", "next", "close",
              "lanes-both", "token-0", "heatmap", "copy-csv", "copy-json",
              "row-sort-weight"}  # fmt: skip
    assert wanted <= set(visited)
    assert sum(name is not None and name.startswith("head-") for name in visited[:40]) == 1

    page.get_by_test_id("head-0.0").focus()
    for key, name in [("ArrowRight", "0.1"), ("ArrowDown", "1.1"), ("End", "1.5"),
                      ("ArrowRight", "2.0"), ("ArrowUp", "1.0"), ("Control+End", "2.5"),
                      ("Home", "2.0"), ("ArrowRight", "2.1")]:  # fmt: skip
        press(key)
        assert focused(page) == f"head-{name}"
    press("Enter")
    assert page.get_by_test_id("panel-title").inner_text() == "Head 2.1"
    assert focused(page) == "heatmap"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        press(key)
    shown = np.float32(page.get_by_test_id("readout-weight").inner_text())
    assert shown == data.weights[2, 1, 8, 2]
    press("Enter")
    assert page.get_by_test_id("pair-query").input_value() == "8"
    press("]")
    assert page.get_by_test_id("panel-title").inner_text() == "Head 2.2"
    press("[")
    press("Escape")
    assert not page.get_by_test_id("panel").is_visible()
    assert focused(page) == "head-2.1"
    assert "#" not in page.url


def test_tokens_are_walked_and_pinned_with_the_keyboard(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), "#0.0")
    page.get_by_test_id("token-0").focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert focused(page) == "token-2"
    assert page.get_by_test_id("sentence-out").inner_text().startswith("was looks at")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    indexes = [page.get_by_test_id(f"readout-{x}-index").inner_text() for x in ("query", "key")]
    assert indexes == ["8", "2"]


def test_question_mark_opens_help_and_escape_closes_only_it(
    open_page: Open, make_data: Make
) -> None:
    page = open_page(make_data(), "#0.0")
    page.keyboard.press("?")
    dialog = page.get_by_test_id("help-dialog")
    assert "previous and next head" in dialog.inner_text()
    page.keyboard.press("]")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert page.get_by_test_id("panel-title").inner_text() == "Head 0.0"


def test_brackets_step_in_the_order_shown(open_page: Open, make_data: Make) -> None:
    data = make_data()
    page = open_page(data)
    page.get_by_test_id("order-rank").check()
    values = data.weights[:, :, 6, 1]
    order = sorted(np.ndindex(values.shape), key=lambda at: -float(values[at]))
    for layer, head in order[1:4]:
        page.keyboard.press("]")
        title = page.get_by_test_id("panel-title").inner_text()
        assert title == f"Head {layer}.{head}"


def test_focus_is_visible_wherever_it_goes(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), "#0.0")
    for _ in range(25):
        page.keyboard.press("Tab")
        ring = page.evaluate("""() => {
            const node = document.activeElement;
            const shown = node.matches(".segments input") ? node.nextElementSibling : node;
            const style = getComputedStyle(shown);
            return [style.outlineStyle, parseFloat(style.outlineWidth), node.tagName];
        }""")
        if ring[2] != "BODY":
            assert ring[0] != "none", focused(page)
            assert ring[1] >= 1, focused(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["maps", "table"])
def test_every_text_has_a_contrast_of_at_least_4_5(
    open_page: Open, make_data: Make, scheme: str, view: str
) -> None:
    page = open_page(make_data(), "#1.1", color_scheme=scheme, reduced_motion="reduce")
    page.get_by_test_id("order-rank").check()
    page.get_by_test_id(f"view-{view}").check()
    page.get_by_test_id("token-5").hover()
    texts = page.evaluate(TEXT_COLOURS)
    assert len(texts) > 100
    poor = [(words, round(contrast(ink, back), 2)) for words, ink, back in texts
            if contrast(ink, back) < 4.5]  # fmt: skip
    assert poor == []


def test_light_and_dark_look_their_part(open_page: Open, make_data: Make) -> None:
    mean: dict[str, float] = {}
    for scheme in ("light", "dark"):
        page = open_page(make_data(), "#1.1", color_scheme=scheme)
        page.get_by_test_id("heatmap").hover(position={"x": 2, "y": 2})
        shot = page.screenshot()
        assert shot[:4] == b"\x89PNG"
        ground = page.evaluate(TEXT_COLOURS)[0][2]
        mean[scheme] = float(np.mean(ground[:3]))
    assert mean["dark"] < 40 < 220 < mean["light"]


def test_the_theme_switch_is_remembered(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), color_scheme="light")
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.get_by_test_id("theme").click()
    dark = page.evaluate(back)
    assert dark != light
    page.reload()
    page.evaluate("polyhead.ready")
    assert page.evaluate(back) == dark


def test_a_browser_that_forbids_storage_still_switches(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), color_scheme="light")
    page.evaluate("""Object.defineProperty(window, "localStorage", {
        get() { throw new DOMException("denied", "SecurityError"); },
    })""")
    page.get_by_test_id("theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_narrow_window_needs_no_sideways_scrolling(open_page: Open, make_data: Make) -> None:
    data = make_data(4, 8, 40)
    page = open_page(data, viewport={"width": 400, "height": 760})
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert not page.get_by_test_id("panel").is_visible()
    assert page.evaluate(fits)
    page.get_by_test_id("head-3.6").click()
    assert page.get_by_test_id("panel").is_visible()
    assert not page.get_by_test_id("grid").is_visible()
    assert page.evaluate(fits)
    box = page.get_by_test_id("heatmap").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 400
    page.get_by_test_id("close").click()
    page.get_by_test_id("view-table").check()
    assert page.evaluate(fits)


def test_reduced_motion_is_respected(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), reduced_motion="reduce")
    moving = page.evaluate("""[...document.querySelectorAll("*")].filter((node) =>
        getComputedStyle(node).transitionDuration !== "0s" ||
        getComputedStyle(node).animationName !== "none").length""")
    assert moving == 0


def test_small_maps_are_drawn_in_device_pixels(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), device_scale_factor=2)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    ratio = page.locator(".cells canvas").first.evaluate(
        "canvas => canvas.width / canvas.getBoundingClientRect().width"
    )
    assert ratio == pytest.approx(2, abs=0.03)


def test_hostile_text_is_shown_and_never_run(open_page: Open, make_data: Make) -> None:
    plain = open_page(make_data(tokens=len(HOSTILE)))
    count = "document.querySelectorAll('img, script:not([id]), b b, i b').length"
    expected = plain.evaluate(count)
    data = replace(
        make_data(3, 6, len(HOSTILE), continuation="<i>", facts={"<b>": HOSTILE[0]}),
        title=HOSTILE[0],
        model=HOSTILE[1],
        tokens=HOSTILE,
    )
    page = open_page(data, "#0.1")
    assert page.evaluate(count) == expected
    assert page.get_by_test_id("title").inner_text() == HOSTILE[0] + "<i>"
    shown = [page.get_by_test_id(f"token-{i}").inner_text() for i in range(len(HOSTILE))]
    assert shown[:4] == [*HOSTILE[:2], "\\u2028", "⏎"]
    assert shown[5:] == ["\\u202eabc", "😀", "漢字", "\ufffd", "\ufffd", "∅", "␣␣", "\\u0000",
                         "&lt;", "{{data}}", "a" * 400]  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for view in ("table", "maps"):
        page.get_by_test_id(f"view-{view}").check()
    page.get_by_test_id("token-0").click()
    page.get_by_test_id("token-1").hover()


def test_roles_and_names_tell_a_screen_reader_what_is_there(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data, "#2.3")
    grid = page.get_by_role("grid", name="All heads as small maps")
    assert grid.get_by_role("row").count() == 3
    cell = grid.get_by_role("gridcell", name=re.compile("^Head 2.3, kv head 1"))
    assert cell.get_attribute("aria-selected") == "true"
    assert f"{data.weights[2, 3, 6, 1]:.3f}" in cell.get_attribute("aria-label")
    nameless = page.eval_on_selector_all(
        "button, select, input, canvas[tabindex], [role=grid], [role=listbox]",
        """nodes => nodes.filter((node) => !(node.ariaLabel || node.textContent.trim() ||
             node.labels?.length)).map((node) => node.outerHTML)""",
    )
    assert nameless == []


def test_the_page_speaks_the_readers_language_and_says_what_to_look_at(
    open_page: Open, make_data: Make
) -> None:
    habits = [[[None, "first", 0.2, 0.3, 0.2, 0]] * 6 for _ in range(3)]
    habits[2][1] = ["induction", "induction", 0.9, 0.1, 0.7, 0]
    habits[0][1] = ["previous", "previous", 0.8, 0.2, 0.8, 0]
    habits[1][4] = ["previous", "previous", 0.5, 0.2, None, 0]
    pair = {"head": [1, 4], "query": 5, "key": 4, "weight": 0.78, "times": 8.2, "near": 0.09,
            "shuffled": 0.08, "others": 0.07}  # fmt: skip
    found = {"pairs": [pair], "habits": habits}
    tokens = ["猫₁", "猫₂", "猫₃", "在", "睡觉", "，", " القطة", "\n", " 累"]
    data = make_data(tokens=9, notable=found)
    page = open_page(replace(data, tokens=tokens), locale="zh-CN")
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    said = page.get_by_test_id("notable").inner_text()
    assert "18 个头中有 1 个主要看向同一词元上次出现之后的词元（归纳）：2.1" in said
    assert "18 个头中有 2 个主要看向前一词元：0.1 · 1.4" in said
    assert "1.4 ， → 睡觉 0.78" in said
    shown = [page.get_by_test_id(f"token-{i}").inner_text() for i in range(9)]
    assert shown == ["猫₁", "猫₂", "猫₃", "在", "睡觉", "，", "القطة", "⏎", "累"]
    joined = page.locator(".token.joined").all_inner_texts()
    assert joined == ["猫₂", "猫₃"]
    page.get_by_test_id("notable-pair-1.4").click()
    assert page.get_by_test_id("panel-title").inner_text() == "头 1.4"
    known = page.get_by_test_id("habit").inner_text()
    assert "有 0.50 的权重落在前一词元；均匀分布时为 0.20，打乱词元顺序后为 –" in known
    assert "1.4 把 “，” 的权重中的 0.78 给了 “睡觉”，是按距离预计值（0.09）的 8 倍" in known
    page.get_by_test_id("notable-2.1").click()
    assert page.get_by_test_id("panel-title").inner_text() == "头 2.1"
    assert "0.09" not in page.get_by_test_id("habit").inner_text()
    page.get_by_test_id("token-8").hover()
    assert page.get_by_test_id("sentence-out").inner_text().startswith("累 看向 ")
    page.get_by_test_id("language").select_option("en")
    assert page.get_by_test_id("panel-title").inner_text() == "Head 2.1"
    said = page.get_by_test_id("notable").inner_text()
    assert "2 of 18 heads attend mostly to the previous token: 0.1 · 1.4" in said
    assert page.get_by_test_id("view-table").locator("..").inner_text() == "Table"
    page.reload()
    page.evaluate("polyhead.ready")
    assert page.get_by_test_id("panel-title").inner_text() == "Head 2.1"
    left = page.evaluate("""[...document.querySelectorAll("[data-t]")]
        .filter((node) => !node.textContent).length""")
    assert left == 0
    alone = open_page(replace(data, language="zh"), locale="en-US")
    assert alone.get_by_test_id("panel-title").inner_text().startswith("头 ")


@pytest.mark.slow
def test_a_page_opens_with_what_stands_out(open_page: Open, make_data: Make) -> None:
    pair = {"head": [1, 4], "query": 5, "key": 3, "weight": 0.5, "times": 5.0, "near": 0.1,
            "shuffled": None, "others": 0.0}  # fmt: skip
    page = open_page(make_data(notable={"pairs": [pair], "habits": []}, focus=(5, 3)))
    assert page.get_by_test_id("panel-title").inner_text() == "Head 1.4"
    assert "shuffled text has as many" not in page.get_by_test_id("notable").inner_text()
    found = {"pairs": [pair], "more": False, "habits": []}
    page = open_page(make_data(notable=found, focus=(5, 3)))
    assert "shuffled text has as many" in page.get_by_test_id("notable").inner_text()
    page = open_page(make_data(notable={"alignment": [[2, 1, 0.9]]}, focus=None))
    assert page.get_by_test_id("panel-title").inner_text() == "Head 2.1"
    page = open_page(make_data(notable={"pairs": [], "habits": []}))
    assert "no weight stands out" in page.get_by_test_id("notable").inner_text()


def test_the_map_of_the_open_head_is_in_view(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(24, 6))  # all maps move when the panel opens
    for name in ("23.1", "2.5"):
        page.evaluate(
            "([layer, head]) => polyhead.select(layer, head)", list(map(int, name.split(".")))
        )
        page.wait_for_function(
            """(name) => {
                const box = document.querySelector("#overview").getBoundingClientRect();
                const head = document.querySelector(`[data-testid="head-${name}"]`);
                const { top, bottom } = head.getBoundingClientRect();
                return top >= box.top && bottom <= box.bottom;
            }""",
            arg=name,
        )
