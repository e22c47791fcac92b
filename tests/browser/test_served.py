"""The served page: exact values on demand, ablation, two looks, what is saved, and large models."""

from __future__ import annotations

import csv
import io
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer

import polyhead as ph
from browser.serving import (
    HANG,
    TEXT,
    TOKEN,
    Held,
    Visit,
    map_of,
    open_head,
    serving,
    text_of,
    weights_of,
)
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.viewer.studio import Studio

pytestmark = pytest.mark.browser


def test_values_shown_equal_the_probe(visit: Visit, model: ph.LanguageModel) -> None:
    page = visit()
    weights, seen = weights_of(model, TEXT)
    open_head(page, "1.2")
    torch.testing.assert_close(map_of(page), weights[1, 2])
    cell, left, top = (
        float(page.get_by_test_id("heatmap").get_attribute(f"data-{name}"))
        for name in ("cell", "left", "top")
    )
    page.get_by_test_id("heatmap").hover(position={"x": left + 5, "y": top + 20.5 * cell})
    assert [text_of(page, f"readout-{side}-index") for side in ("query", "key")] == ["20", "0"]
    told = float(text_of(page, "readout-weight"))
    assert told == pytest.approx(float(weights[1, 2, 20, 0]), rel=1e-5)
    entropy = float(text_of(page, "number-1"))
    assert entropy == pytest.approx(float(seen[1].summary().entropy[2]), abs=1e-3)
    numbers = text_of(page, "numbers").split("\n")
    labels = ["entropy", "effective keys", "first token", "previous token", "self"]
    assert [numbers.index(name) for name in labels] == sorted(map(numbers.index, labels))
    page.evaluate("polyhead.look.pair(20, 3)")
    page.evaluate("polyhead.settled()")
    pair = page.evaluate("[...polyhead.look.pair(20, 3)]")
    assert pair == pytest.approx(weights[:, :, 20, 3].flatten().tolist(), abs=1e-6)


def test_small_maps_hold_the_largest_weights_of_their_lines(
    visit: Visit, model: ph.LanguageModel
) -> None:
    page = visit()
    weights, _ = weights_of(model, TEXT)
    found = page.evaluate("[...polyhead.look.small(0, 3, false).values]")
    roots = torch.tensor(found).view(30, 30).sqrt() * 255  # as many pixels as tokens
    torch.testing.assert_close(roots, (weights[0, 3].sqrt() * 255), atol=1, rtol=0)
    page.get_by_test_id("hide-first").check()
    page.wait_for_function("() => polyhead.look.small(0, 3, true)")
    shares = torch.tensor(page.evaluate("[...polyhead.look.small(0, 3, true).values]"))
    rest = weights[0, 3, :, 1:] / weights[0, 3, :, 1:].sum(-1, keepdim=True).clamp(min=1e-9)
    torch.testing.assert_close(shares.view(30, 30)[:, 1:], rest, atol=0.01, rtol=0)


def test_heads_are_sorted_and_filtered_by_a_statistic(
    visit: Visit, model: ph.LanguageModel
) -> None:
    page = visit()
    _, seen = weights_of(model, TEXT)
    first = {f"{i}.{h}": float(x) for i in (0, 1) for h, x in enumerate(seen[i].summary().entropy)}
    page.get_by_test_id("measure").select_option(label="entropy")
    page.get_by_test_id("order-rank").check()
    names = page.evaluate("[...document.querySelectorAll('.head')].map(x => x.dataset.testid)")
    assert names == [f"head-{name}" for name in sorted(first, key=first.__getitem__, reverse=True)]
    least = sorted(first.values())[5]
    page.get_by_test_id("least").fill(f"{least - 1e-6:.7f}")
    assert text_of(page, "shown") == "3 of 8 heads"
    page.get_by_test_id("least").fill("")
    page.get_by_test_id("layers").fill("1")
    assert text_of(page, "shown") == "4 of 8 heads"


def test_zoom_shows_a_part_and_its_exact_weights(visit: Visit, model: ph.LanguageModel) -> None:
    page = visit()
    weights, _ = weights_of(model, TEXT)
    open_head(page, "0.1")
    page.get_by_test_id("heatmap").focus()
    for key in ("+", "+", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
    page.evaluate("polyhead.settled()")
    ends = page.evaluate("polyhead.maps[0].ends")
    assert ends["q1"] - ends["q0"] == 13
    part = weights[0, 1, ends["q0"] : ends["q1"], ends["k0"] : ends["k1"]]
    torch.testing.assert_close(map_of(page), part)
    assert f"queries {ends['q0']}–{ends['q1'] - 1}" in text_of(page, "readout")
    page.keyboard.press("0")
    assert page.evaluate("polyhead.maps[0].window.size") == 30


def test_a_long_text_is_shown_in_cells_rows_and_columns(
    visit: Visit, model: ph.LanguageModel
) -> None:
    """As texts of more tokens than are kept whole, with that number made small."""
    page = visit("#1.1")
    weights, _ = weights_of(model, TEXT)
    found = page.evaluate(
        """async () => {
            const { look } = polyhead;
            look.isShort = () => false;
            look.answers.clear();
            const asked = () => [look.row(1, 1, 17), look.column(1, 1, 4),
                look.part(1, 1, { q0: 0, q1: 30, k0: 0, k1: 30 }, 8)];
            asked();
            await polyhead.settled();
            const [row, column, part] = asked();
            return [[...row], [...column], part.rows, part.cell, [...part.values]];
        }"""
    )
    row, column, rows, cell, values = found
    torch.testing.assert_close(torch.tensor(row), weights[1, 1, 17])
    torch.testing.assert_close(torch.tensor(column), weights[1, 1, :, 4])
    assert (rows, cell) == (8, 4)
    assert values[0] == pytest.approx(float(weights[1, 1, :4, :4].max()))


def test_ablating_heads_changes_the_next_token(visit: Visit, model: ph.LanguageModel) -> None:
    page = visit("#1.0")
    assert text_of(page, "panel-title") == "Head 1.0"
    page.get_by_test_id("ablate").click()
    page.get_by_test_id("next-without-0").wait_for()
    shown = [
        float(words)
        for words in page.locator("[data-testid^=next-without]").all_inner_texts()
        if words
    ]
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with ph.ablate(model, {1: [0]}), torch.no_grad():
        shares = model(ids, last=1)[0, -1].softmax(-1)
    assert max(shown) == pytest.approx(float(shares.max()), abs=1e-4)
    assert "without 1.0" in text_of(page, "ablated")
    assert page.get_by_test_id("ablate").get_attribute("aria-pressed") == "true"
    page.get_by_test_id("look-without").click()
    page.evaluate("polyhead.ready")
    assert "without 1.0" in text_of(page, "asking-note")
    now = float(text_of(page, "next-0"))
    assert now == pytest.approx(float(shares.max()), abs=1e-4)


def test_a_text_is_continued_with_the_temperature_and_top_k_of_the_page(
    visit: Visit, model: ph.LanguageModel
) -> None:
    page = visit("#1.0")
    page.get_by_test_id("top-k").fill("1")  # greedy, whatever the temperature
    page.get_by_test_id("write-count").fill("6")
    page.get_by_test_id("write").click()
    page.get_by_test_id("take-written").wait_for()
    written = page.evaluate("document.querySelector('#written').textContent")
    assert written == model.generate(TEXT, max_new_tokens=6).text
    page.get_by_test_id("take-written").click()
    page.evaluate("polyhead.ready")
    assert page.evaluate("polyhead.look.title") == TEXT + written


def test_a_look_shows_how_far_it_is_and_is_cancelled(visit: Visit, model: ph.LanguageModel) -> None:
    page = visit()
    told = threading.Event()

    def wait(*call: object) -> None:
        told.wait()

    slow = model.transformer.layers[1].register_forward_pre_hook(wait)
    try:
        page.get_by_test_id("look").click()
        page.get_by_text("the model runs: layer").wait_for()
        assert " of 2…" in text_of(page, "asking-note")
        page.get_by_test_id("cancel").click()
        page.get_by_test_id("status").filter(has_text="cancelled").wait_for()
        page.evaluate("polyhead.ready")
        assert text_of(page, "status") == "cancelled"
        assert page.get_by_test_id("cancel").is_hidden()
    finally:
        slow.remove()
        told.set()
    page.get_by_test_id("look").click()
    page.evaluate("polyhead.ready")
    assert "30 tokens" in text_of(page, "asking-note")


def test_two_looks_stand_side_by_side(visit: Visit, model: ph.LanguageModel) -> None:
    page = visit("#0.2")
    page.get_by_test_id("compare").check()
    page.get_by_test_id("text-b").fill("Another text")
    page.get_by_test_id("model-b").select_option("other")
    page.get_by_test_id("look").click()
    page.evaluate("polyhead.ready")
    page.evaluate("polyhead.settled()")
    weights, _ = weights_of(model, "Another text")  # layer 0 sees the same, its output is zeroed
    torch.testing.assert_close(map_of(page, 1), weights[0, 2])
    assert "other: 12 tokens" in text_of(page, "asking-note")
    assert text_of(page, "beside-note") == "other: Another text"
    assert page.get_by_test_id("number-1-b").is_visible()
    page.get_by_test_id("heatmap-b").focus()
    page.keyboard.press("ArrowUp")
    assert float(text_of(page, "readout-weight-b")) == pytest.approx(float(weights[0, 2, 10, 0]))


def test_what_is_saved_holds_what_is_shown(
    visit: Visit, model: ph.LanguageModel, tmp_path: Path
) -> None:
    page = visit("#1.1", accept_downloads=True)
    page.evaluate("polyhead.settled()")
    weights, seen = weights_of(model, TEXT)
    saved = {}
    for kind in ("png", "svg", "csv", "page"):
        with page.expect_download() as download:
            page.get_by_test_id(f"save-{kind}").click()
        saved[kind] = tmp_path / kind
        download.value.save_as(saved[kind])
    assert saved["png"].read_bytes().startswith(b"\x89PNG")
    cells = ElementTree.parse(saved["svg"]).getroot().findall("{*}rect/{*}title")
    shown = [float(cell.text) for cell in cells]
    assert sorted(shown) == pytest.approx(
        sorted(x for x in weights[1, 1].flatten().tolist() if x >= 0.001)
    )
    table = list(csv.DictReader(io.StringIO(saved["csv"].read_text())))
    assert len(table) == 8
    entropy = float(table[5]["entropy"])
    assert entropy == pytest.approx(float(seen[1].summary().entropy[1]))
    assert "page-data" in saved["page"].read_text()


def _large() -> ph.LanguageModel:
    """1,024 heads: 32 layers of 32, over a context of 4,096 tokens."""
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=8, rope=RopeConfig())
    layer = LayerConfig(attention, FeedForwardConfig(hidden_dim=64))
    config = TransformerConfig(
        kind="decoder", vocab_size=259, embed_dim=256, max_positions=4096, layers=(layer,) * 32
    )
    return ph.LanguageModel(ph.Transformer(config), byte_tokenizer(), "large").eval()


def _smollm2() -> ph.LanguageModel:
    try:
        return ph.load("smollm2")
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))


def _long_text(model: ph.LanguageModel) -> str:
    """4,096 tokens."""
    import pydoc_data.topics

    ids = model.tokenizer.encode("\n".join(pydoc_data.topics.topics.values())[:30_000])[:4096]
    text = model.tokenizer.decode(ids)
    assert len(model.tokenizer.encode(text)) == 4096
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "heads"),
    [(_large, 1024), pytest.param(_smollm2, 270, marks=pytest.mark.model)],
    ids=["1024-heads", "smollm2"],
)
def test_4096_tokens_of_all_heads_are_painted_and_opened_in_time(
    chromium: Any, make: Callable[[], ph.LanguageModel], heads: int
) -> None:
    """All maps that the window shows are drawn without an answer for another layer and in less time
    than the model ran, all maps are < 2 MB, and half of the heads are opened in a quarter of the
    time that a layer's statistics take, while these are being measured."""
    model = make()
    last = len(model.config.layers) - 1
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    page.add_init_script("performance.setResourceTimingBufferSize(100_000)")
    page.set_default_timeout(HANG)
    sizes: list[int] = []
    foreign: list[str] = []
    page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    with ExitStack() as stack:
        stack.callback(page.close)
        studio = Studio(lambda name: model, ["large"])
        address = stack.enter_context(contextmanager(serving)(studio, _long_text(model)))
        here = (address, "data:", "blob:")
        page.on(
            "request",
            lambda request: None if request.url.startswith(here) else foreign.append(request.url),
        )
        thumbnails, statistics = Held(page, "thumbnails"), Held(page, "statistics")
        page.goto(f"{address}{TOKEN}/")
        page.wait_for_function("() => document.querySelector('.head')", timeout=0)  # the model runs
        seen = page.evaluate(
            """[...document.querySelectorAll(".head")]
                .filter((head) => head.getBoundingClientRect().top < innerHeight)
                .map(({ dataset }) => [Number(dataset.layer), Number(dataset.head)])"""
        )
        lowest = max(layer for layer, _ in seen)
        assert lowest < last
        thumbnails.answer(lambda layer: layer <= lowest)
        page.wait_for_function("seen => seen.every((at) => polyhead.isDrawn(...at))", arg=seen)
        drawn = page.evaluate(
            """async () => {
                await new Promise((again) => requestAnimationFrame(again));
                const answers = performance.getEntriesByType("resource");
                const ran = answers.find(({ name }) => name.endsWith("/look"));
                const [begun, ended] = [ran.startTime, ran.responseEnd];
                return { model: ended - begun, screen: performance.now() - ended };
            }"""
        )
        assert statistics.routes == []
        statistics.answer(lambda layer: True)
        thumbnails.answer(lambda layer: True)
        page.evaluate("polyhead.painted")
        sent = sum(sizes)
        assert page.locator(".head").count() == heads
        opened = [
            page.evaluate(
                """async (at) => {
                    const began = performance.now();
                    await polyhead.select(...at);
                    return performance.now() - began;
                }""",
                [layer, head],
            )
            for layer, head in [(0, 0), (7, 7), (19, 2), (last, 8), (3, 5), (11, 1), (last, 0)]
        ]
        measured = page.wait_for_function(
            """() => {
                const answers = performance.getEntriesByType("resource");
                const first = answers.find(({ name }) => name.includes("/statistics/"));
                return first && first.responseEnd - first.startTime;
            }"""
        ).json_value()
    print({"drawn ms": drawn, "bytes": sent, "heads ms": opened, "statistics ms": measured})
    assert foreign == []
    assert drawn["screen"] < drawn["model"]
    assert sent < 2_000_000
    assert sorted(opened)[len(opened) // 2] < measured / 4
