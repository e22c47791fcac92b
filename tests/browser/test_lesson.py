"""The lesson in a browser: its arithmetic is polyhead's, for every hand, eye and language."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyhead as ph
from browser.contrast import TEXT_COLOURS, contrast
from polyhead.planning import tiled_pairs
from polyhead.viewer.lesson import write
from polyhead.viewer.lesson.numbers import lesson_numbers
from polyhead.viewer.lesson.numbers import scaling as scaling_numbers
from polyhead.viewer.lesson.page import SCENES

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("lesson") / "lesson.html")


def text(page: Any, name: str) -> str:
    return str(page.get_by_test_id(name).inner_text())


def compare_attention(page: Any) -> None:
    draw = random.Random(5)
    q, k, v = ([[draw.gauss(0, 2) for _ in range(3)] for _ in range(rows)] for rows in (6, 6, 6))
    masks = {
        "none": (None, 0),
        "causal": (ph.Causal(), 0),
        "window": (ph.Causal() & ph.Window(2), 2),
        "prefix": (ph.Prefix(3) | ph.Causal(), 3),
        "documents": (ph.Causal() & ph.Documents([2, 4]), 2),
        "padding": (ph.KeyLengths(4), 4),
    }
    tensors = [torch.tensor(x, dtype=torch.float64)[None, None] for x in (q, k, v)]
    for name, (mask, n) in masks.items():
        found = page.evaluate(
            "([q, k, v, name, n]) => polyhead.attend(q, k, v, "
            "{ visible: (i, j) => polyhead.MASKS[name](i, j, n) }).out",
            [q, k, v, name, n],
        )
        wanted = ph.attention(*tensors, mask=mask)[0, 0]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, msg=name)


def compare_scaling(page: Any) -> None:
    scaling = scaling_numbers()
    for size in (1, 64, 256):
        for on in (True, False):
            q = torch.tensor(scaling["query"], dtype=torch.float64)[None, None, None, :size]
            k = torch.tensor(scaling["keys"], dtype=torch.float64)[None, None, :, :size]
            eye = torch.eye(8, dtype=torch.float64)[None, None]
            wanted = ph.attention(q, k, eye, scale=None if on else 1.0)[0, 0, 0]
            found = page.evaluate(
                "([size, on]) => polyhead.scaledWeights(size, on).weights[0]", [size, on]
            )
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted)


def compare_tiles(page: Any) -> None:
    flash = {"scores": [1, 2, 0, 3, 1, 4, 2, 0], "values": [1, 0, 2, 1, 3, 1, 0, 2]}
    states = page.evaluate(
        "([x, v]) => polyhead.online(x, v, 2)", [flash["scores"], flash["values"]]
    )
    scores = torch.tensor(flash["scores"], dtype=torch.float64)
    k, v = (torch.tensor(x, dtype=torch.float64)[None, None, :, None]
            for x in (flash["scores"], flash["values"]))  # fmt: skip
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out, lse = ph.attention(one, k, v, scale=1.0, return_lse=True)
    last = states[-1]
    assert last["o"] / last["l"] == pytest.approx(float(out), abs=1e-12)
    assert last["m"] == scores.max()
    assert last["m"] + torch.tensor(last["l"]).log() == pytest.approx(float(lse), abs=1e-6)
    for causal in (True, False):
        settings = {"tokens": 2048, "size": 64, "side": 128, "bytes": 2, "causal": causal}
        moved = page.evaluate("settings => polyhead.traffic(settings)", settings)
        pairs = tiled_pairs(2048, tile=128, ahead=0 if causal else None)
        matrix = 2048 * 64 * 2
        assert moved["whole"] == 4 * matrix + 4 * 2048**2 * 2
        assert moved["tiled"] == 2 * matrix + pairs // 128 * 2 * 64 * 2
        assert (
            len(page.evaluate("settings => polyhead.tiles(settings)", settings)) == pairs // 128**2
        )


def compare_rotation(page: Any) -> None:
    x = [0.3, -1.2]
    wanted = ph.RoPE().apply(torch.tensor(x, dtype=torch.float64)[None, None, None], 5)
    found = page.evaluate("x => polyhead.rotated(x, 5)", x)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted[0, 0, 0])
    same, moved = ([page.evaluate("([order, on]) => polyhead.inOrder(order, on)", [order, on])
                    for order in ([0, 1, 2], [2, 0, 1])] for on in (False, True))  # fmt: skip
    assert torch.allclose(*map(torch.tensor, same))
    assert not torch.allclose(*map(torch.tensor, moved), atol=0.01)


def check_exercises(page: Any) -> None:
    """Every answer is accepted, another one is not."""
    answers = lesson_numbers()["exercises"]
    given = [
        [f"{name}-{number}", str(answer + more)]
        for name, each in answers.items()
        for number, answer in enumerate(each, 1)
        for more in (1, 0)
    ]
    said = page.evaluate(
        """given => given.map(([key, text]) => {
            const field = document.querySelector(`[data-testid="ask-${key}"]`);
            field.value = text;
            field.form.requestSubmit();
            return document.querySelector(`[data-testid="said-${key}"]`).className;
        })""",
        given,
    )
    wrong = [each for each, found, wanted in
             zip(given, said, ["wrong", "right"] * (len(given) // 2), strict=True)
             if found != wanted]  # fmt: skip
    assert wrong == []
    # One of them as a reader writes it.
    page.get_by_test_id("ask-qkv-1").fill("8")
    page.get_by_test_id("ask-qkv-1").press("Enter")
    assert page.get_by_test_id("said-qkv-1").get_attribute("class") == "wrong"
    for given, answer, right in (
        ("1,024", 1024, True),
        ("0,67", 0.673, True),
        ("−0.42", -0.416, True),
        ("", 0, False),
        ("seven", 7, False),
    ):
        assert page.evaluate("([x, a]) => polyhead.isRight(x, a)", [given, answer]) is right, given


def check_names(page: Any) -> None:
    """What a screen reader needs: names for all that can be used, headings, landmarks."""
    nameless = page.eval_on_selector_all(
        "button, select, input, a, svg[role=img], [role=grid], [role=region], .matrix, fieldset",
        """nodes => nodes.filter((node) => !(node.ariaLabel || node.textContent.trim() ||
             node.labels?.length)).map((node) => node.outerHTML)""",
    )
    assert nameless == []
    assert page.locator("main").count() == page.locator("h1").count() == 1
    assert page.locator("main section[aria-labelledby] > h2").count() == len(SCENES)
    doubled = page.evaluate("""() => {
        const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
        return ids.filter((id, i) => ids.indexOf(id) !== i);
    }""")
    assert doubled == []


def test_the_lesson_computes_as_polyhead_and_speaks_both_languages(
    open_file: Open, lesson: Path
) -> None:
    page = open_file(lesson, locale="zh-CN")
    compare_attention(page)
    compare_scaling(page)
    compare_tiles(page)
    compare_rotation(page)
    check_exercises(page)
    check_names(page)
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    page.get_by_test_id("cache-layout-MLA").check()
    said = page.locator("body").inner_text()
    for words in (
        "缩放点积注意力",
        "多头注意力",
        "因果掩码",
        "KV 缓存",
        "低秩潜变量",
        "查询、键、值",
    ):
        assert words in said
    # The worked example: one step forward, and the number that the arrow keys choose.
    for _ in range(5):
        page.get_by_test_id("example-on").click()
    assert text(page, "example-title").startswith("6. 头1")
    page.get_by_test_id("language").select_option("en")
    assert text(page, "example-title") == "6. Head 1: scaled scores"
    page.get_by_test_id("example-on").click()
    page.get_by_test_id("example-on").click()
    page.get_by_test_id("example-on").click()
    page.locator("[data-testid=scene-example] td[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    assert text(page, "example-working") == "4.113 / 6.113 = 0.673"
    page.keyboard.press("ArrowRight")
    assert text(page, "example-working") == "1 / 6.113 = 0.164"
    # A picture of the path opens its step, for both heads beside each other.
    page.get_by_test_id("path-head2.A").click()
    assert text(page, "example-title").startswith("18. Head 2: attention weights")
    assert page.get_by_test_id("path-head2.A").get_attribute("aria-current") == "step"
    assert page.get_by_test_id("path").locator("svg").count() == 18
    assert page.get_by_test_id("pairs").locator(".framed").count() == 3
    maps = page.locator("[data-testid=real-of-heads] .map").evaluate_all(
        "nodes => nodes.map((node) => node.getBoundingClientRect().top)"
    )
    assert maps[0] == maps[1]  # side by side
    # The live parts say what plan says.
    page.get_by_test_id("cache-model").select_option("deepseek-v2")
    said = text(page, "cache-said")
    assert "DeepSeek-V2" in said
    assert "1.8 % of MHA's" in said
    page.get_by_test_id("heads-count-4").check()
    assert "all four in 99.9 %" in text(page, "heads-said")
    page.get_by_test_id("qkv-token-2").check()
    page.get_by_label("X 3, 1", exact=True).fill("3")
    assert "word 3 asks with the query [3, 1]" in page.get_by_test_id("scene-qkv").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 390)])
def test_every_scene_fits_and_can_be_read(
    open_file: Open, lesson: Path, language: str, scheme: str, width: int
) -> None:
    page = open_file(
        lesson, locale=language, color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name in SCENES:
        box = page.get_by_test_id(f"scene-{name}").bounding_box()
        assert box["height"] > 150, name
        assert box["x"] + box["width"] <= width, name
    hidden = page.evaluate("""
        [...document.querySelectorAll("main td, main th, main svg, main input")]
        .filter((node) => node.getBoundingClientRect().right > innerWidth)
        .map((node) => node.closest("section").id)""")
    assert hidden == []  # every column is seen without scrolling sideways
    looks = page.evaluate(
        "[...document.querySelectorAll('section')].map((x) => getComputedStyle(x))"
        ".map((x) => `${x.backgroundColor} ${x.borderTop} ${x.padding}`)"
    )
    assert len(set(looks)) == 1  # the styles of the other pages do not reach a scene
    texts = page.evaluate(TEXT_COLOURS)
    assert len(texts) > 300
    poor = [(words, round(contrast(ink, back), 2)) for words, ink, back in texts
            if contrast(ink, back) < 4.5]  # fmt: skip
    assert poor == []


@pytest.mark.slow
def test_all_is_reached_by_keyboard_and_focus_stays_where_it_was(
    open_file: Open, lesson: Path
) -> None:
    page = open_file(lesson, locale="en")
    visited = set()
    for _ in range(280):
        page.keyboard.press("Tab")
        visited.add(page.evaluate("document.activeElement.dataset.testid ?? null"))
    wanted = {"language", "theme", "go-table", "scores-size", "scores-scale", "example-step",
              "example-on", "masks-n", "cache-model", "cache-tokens", "cache-batch", "flash-tokens",
              "flash-play", "flash-on", "flash-time", "layers-layer", "layers-token"}  # fmt: skip
    page.get_by_test_id("masks-kind-window").check()
    for _ in range(2):
        page.keyboard.press("Tab")
        visited.add(page.evaluate("document.activeElement.dataset.testid ?? null"))
    assert wanted <= visited
    page.get_by_test_id("scores-size").focus()
    before = text(page, "scores-said")
    page.keyboard.press("ArrowRight")
    assert text(page, "scores-said") != before
    assert page.evaluate("document.activeElement.dataset.testid") == "scores-size"
    page.get_by_test_id("flash-on").click()
    assert "block 2, keys and values of block 1" in text(page, "flash-step-said")
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.id") == f"{SCENES[0]}-title"
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.id") == f"{SCENES[1]}-title"


@pytest.mark.slow
def test_tiles_move_until_all_bytes_are_counted(open_file: Open, lesson: Path) -> None:
    page = open_file(lesson, locale="en")
    last = page.get_by_test_id("flash-time").evaluate("node => Number(node.max)")
    page.get_by_test_id("flash-time").fill(str(last))
    assert "Moved so far: 4.75 MiB" in text(page, "flash-step-said")
    play = text(page, "flash-play")
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)  # from here on time is what is said
    page.get_by_test_id("flash-play").click()
    page.clock.run_for(700)
    time = page.get_by_test_id("flash-time")
    assert 0 < int(shown := time.input_value()) < last
    page.get_by_test_id("flash-play").click()
    page.clock.run_for(700)
    assert time.input_value() == shown
    page.get_by_test_id("flash-play").click()
    page.clock.run_for(1000 * last)
    assert (time.input_value(), text(page, "flash-play")) == (str(last), play)
    assert "Moved so far: 4.75 MiB" in text(page, "flash-step-said")
