"""The page in a browser: what a person reads on it equals the weights that went in."""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from head_statistics import head_statistics
from polyhead.viewer.page import PageData, write

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Make = Callable[..., PageData]


def text(page: Any, name: str) -> str:
    return str(page.get_by_test_id(name).inner_text())


def exact(page: Any, name: str = "readout-weight") -> np.float32:
    return np.float32(text(page, name))


def readout(page: Any) -> tuple[int, int, np.float32]:
    query, key = text(page, "readout-query-index"), text(page, "readout-key-index")
    return int(query), int(key), exact(page)


def cell_position(page: Any, query: int, key: int) -> dict[str, float]:
    shape = page.get_by_test_id("heatmap").evaluate("canvas => ({ ...canvas.dataset })")
    cell, left, top = (float(shape[name]) for name in ("cell", "left", "top"))
    return {"x": left + (key + 0.5) * cell, "y": top + (query + 0.5) * cell}


def pixel(page: Any, name: str, x: float, y: float) -> list[int]:
    """The colour at CSS position x, y of the canvas called `name`, or of that head's small map."""
    script = """(node, [x, y]) => {
        const canvas = node.closest(".cells")?.querySelector("canvas") ?? node;
        const box = canvas.getBoundingClientRect();
        const scale = canvas.width / box.width;
        const { left, top } = node.getBoundingClientRect();
        const [right, down] = [left - box.left + x, top - box.top + y];
        const point = new OffscreenCanvas(1, 1).getContext("2d");
        point.drawImage(canvas, -Math.floor(right * scale), -Math.floor(down * scale));
        return [...point.getImageData(0, 0, 1, 1).data];
    }"""
    return list(page.get_by_test_id(name).evaluate(script, [x, y]))


def on_screen(page: Any, name: str, x: float, y: float) -> list[int]:
    """The colour that one sees at CSS position x, y of the element called `name`."""
    box = page.get_by_test_id(name).bounding_box()
    clip = {"x": int(box["x"] + x), "y": int(box["y"] + y), "width": 1, "height": 1}
    content = page.screenshot(clip=clip)
    at, packed = 8, b""  # chunks of PNG: length, kind, data, checksum
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        if content[at + 4 : at + 8] == b"IDAT":
            packed += content[at + 8 : at + 8 + length]
        at += length + 12
    return list(zlib.decompress(packed)[1:4])  # behind the number of the line's filter


def heads_in_order(page: Any, selector: str) -> list[tuple[int, int]]:
    names = page.eval_on_selector_all(
        selector, "nodes => nodes.map(n => n.dataset.testid.replace(/^(head|row)-/, ''))"
    )
    return [tuple(int(n) for n in name.split(".")) for name in names]


def order_of(values: np.ndarray, *, descending: bool) -> list[tuple[int, int]]:
    sign = -1 if descending else 1
    return sorted(np.ndindex(values.shape), key=lambda at: sign * float(values[at]))


def settle(page: Any) -> None:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("causal", [True, False])
def test_every_weight_in_the_browser_equals_the_one_given(
    open_page: Open, make_data: Make, causal: bool
) -> None:
    data = make_data(causal=causal)
    found = open_page(data).evaluate(
        "places => places.map((place) => polyhead.weight(...place))",
        [list(place) for place in np.ndindex(data.weights.shape)],
    )
    np.testing.assert_array_equal(np.float32(found).reshape(data.weights.shape), data.weights)


def test_a_wide_window_opens_the_head_that_is_strongest_for_the_pair(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data)
    layer, head = order_of(data.weights[:, :, 6, 1], descending=True)[0]
    assert text(page, "panel-title") == f"Head {layer}.{head}"
    assert readout(page) == (6, 1, data.weights[layer, head, 6, 1])
    assert text(page, "title") == data.title + data.continuation
    assert "tiled" in text(page, "facts")


def test_a_click_enlarges_a_head_and_its_cells_read_exact_weights(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data)
    page.get_by_test_id("head-2.4").click()
    assert text(page, "panel-title") == "Head 2.4"
    for query, key in [(8, 0), (5, 4), (3, 3), (2, 7)]:
        page.get_by_test_id("heatmap").hover(position=cell_position(page, query, key))
        assert readout(page) == (query, key, data.weights[2, 4, query, key])
        assert text(page, "readout-query") == data.tokens[query].replace(" ", "␣")
        assert text(page, "readout-weight") in text(page, "tip")
    page.get_by_test_id("heatmap").click(position=cell_position(page, 7, 2))
    page.mouse.move(0, 0)
    assert readout(page) == (7, 2, data.weights[2, 4, 7, 2])
    assert page.get_by_test_id("pair-query").input_value() == "7"
    assert page.get_by_test_id("pair-key").input_value() == "2"


def test_maps_draw_queries_down_and_keys_across(open_page: Open, make_data: Make) -> None:
    weights = np.zeros((1, 2, 9, 9), np.float32)
    weights[0, 1, 7, 2] = 1
    page = open_page(make_data(1, 2, weights=weights, num_kv_heads=1), "#0.1")
    settle(page)
    side = page.get_by_test_id("head-0.1").bounding_box()["width"] / 9
    dark, pale = (pixel(page, "head-0.1", (k + 0.5) * side, (q + 0.5) * side)
                  for q, k in [(7, 2), (5, 2)])  # fmt: skip
    assert sum(dark[:3]) < 250 < 650 < sum(pale[:3])
    assert on_screen(page, "head-0.1", 2.5 * side, 7.5 * side) == dark[:3]
    assert pixel(page, "head-0.1", 7.5 * side, 2.5 * side)[3] == 0  # above the diagonal: nothing
    large = cell_position(page, 7, 2)
    assert pixel(page, "heatmap", large["x"], large["y"]) == dark
    turned = cell_position(page, 2, 7)
    assert pixel(page, "heatmap", turned["x"], turned["y"])[3] == 0


def test_table_and_ranked_maps_follow_every_statistic_both_ways(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data)
    columns = {
        "pair": data.weights[:, :, 6, 1],
        **head_statistics(data.weights),
    }
    page.get_by_test_id("order-rank").check()
    page.get_by_test_id("view-table").check()
    for index, (name, values) in enumerate(columns.items()):
        if index:
            page.get_by_test_id(f"sort-{index}").click()
        for descending in (True, False):
            expected = order_of(values, descending=descending)
            assert heads_in_order(page, "#heads-body tr") == expected, name
            assert heads_in_order(page, ".head") == expected, name
            header = page.locator("th[aria-sort]:not([aria-sort=none])").first
            assert header.get_attribute("aria-sort") == "descending" if descending else "ascending"
            page.get_by_test_id(f"sort-{index}").click()
    page.get_by_test_id("view-maps").check()
    page.get_by_test_id("measure").select_option("2")
    page.get_by_test_id("direction").click()
    expected = order_of(columns["first_token"], descending=False)
    assert heads_in_order(page, ".head") == expected
    page.get_by_test_id("order-layer").check()
    assert heads_in_order(page, ".head") == list(np.ndindex(3, 6))


def test_statistics_without_a_number_sort_last_both_ways(open_page: Open, make_data: Make) -> None:
    values = np.arange(18, dtype=np.float32).reshape(3, 6)
    values[0, 3] = np.nan
    page = open_page(make_data(statistics={"mine": values}))
    page.get_by_test_id("view-table").check()
    for _ in range(2):
        page.get_by_test_id("sort-1").click()
        assert heads_in_order(page, "#heads-body tr")[-1] == (0, 3)


def test_pinning_tokens_changes_the_pair_and_its_ranking(open_page: Open, make_data: Make) -> None:
    data = make_data()
    page = open_page(data)
    page.get_by_test_id("view-table").check()
    page.get_by_test_id("token-8").click()
    page.get_by_test_id("token-4").click(modifiers=["Shift"])
    assert readout(page)[:2] == (8, 4)
    expected = order_of(data.weights[:, :, 8, 4], descending=True)
    assert heads_in_order(page, "#heads-body tr") == expected
    page.get_by_test_id("pair-query").select_option("5")
    assert heads_in_order(page, "#heads-body tr") == order_of(
        data.weights[:, :, 5, 4], descending=True
    )


def test_hovering_a_token_shows_where_it_looks_and_what_looks_at_it(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data, "#1.2")
    weights = data.weights[1, 2]
    page.get_by_test_id("token-4").hover()
    strongest = int(weights[4].argmax())
    word = data.tokens[strongest].strip()
    assert text(page, "sentence-out").startswith(f"tired looks at {word} {weights[4].max():.3f}")
    looking = int(weights[:, 4].argmax())
    assert f"by {data.tokens[looking].strip()} {weights[looking, 4]:.3f}" in text(
        page, "sentence-in"
    )
    shade = "node => getComputedStyle(node).backgroundColor"
    clear = "rgba(0, 0, 0, 0)"
    backs = [page.get_by_test_id(f"token-{i}").evaluate(shade) for i in range(9)]
    bars = [page.locator(f"[data-testid=token-{i}] i").evaluate(shade) for i in range(9)]
    assert [back != clear for back in backs] == [k <= 4 for k in range(9)]
    assert [bar != clear for bar in bars] == [q >= 4 for q in range(9)]
    page.get_by_test_id("lanes-out").check()
    page.get_by_test_id("token-4").hover()
    assert page.locator("[data-testid=token-8] i").evaluate(shade) == clear
    assert not page.get_by_test_id("sentence-in").is_visible()


def test_the_row_table_is_exact_sortable_and_copied_whole(open_page: Open, make_data: Make) -> None:
    data = make_data(tokens=9)
    page = open_page(data, "#0.5")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    row = data.weights[0, 5, 6]
    cells = "[data-testid=row-table] tbody td:nth-child({})"
    assert [np.float32(x) for x in page.locator(cells.format(3)).all_inner_texts()] == list(row)
    page.get_by_test_id("row-sort-weight").click()
    keys = [int(x) for x in page.locator(cells.format(1)).all_inner_texts()]
    assert keys == sorted(range(9), key=lambda k: -row[k])
    page.get_by_test_id("copy-csv").click()
    lines = list(csv.DictReader(io.StringIO(page.evaluate("copied"))))
    assert [np.float32(line["weight"]) for line in lines] == list(row)
    assert [line["key_token"] for line in lines] == list(data.tokens)
    page.get_by_test_id("copy-json").click()
    copied = json.loads(page.evaluate("copied"))
    assert [np.float32(entry["weight"]) for entry in copied["weights"]] == list(row)
    assert (copied["layer"], copied["head"], copied["query"]["index"]) == (0, 5, 6)


def test_scale_and_hidden_first_token_change_colours_but_no_number(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data, "#1.0")
    seen = set()
    page.mouse.move(0, 0)
    at, first = cell_position(page, 7, 3), cell_position(page, 7, 0)
    for scale in ("linear", "sqrt", "log"):
        page.get_by_test_id(f"scale-{scale}").check()
        seen.add(tuple(pixel(page, "heatmap", **at)))
    page.get_by_test_id("scale-sqrt").check()
    page.get_by_test_id("hide-first").check()
    seen.add(tuple(pixel(page, "heatmap", **at)))
    assert len(seen) == 4
    # The first column is left blank but for its hatching, never in a colour of the ramp.
    red, green, blue, _ = pixel(page, "heatmap", **first)
    assert max(red, green, blue) - min(red, green, blue) < 16
    page.get_by_test_id("heatmap").hover(position=cell_position(page, 7, 3))
    assert readout(page) == (7, 3, data.weights[1, 0, 7, 3])
    assert exact(page, "number-2") == np.float32(
        f"{head_statistics(data.weights)['first_token'][1, 0]:.3f}"
    )


def test_deep_links_select_and_back_and_forward_follow(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(), "#2.3")
    assert text(page, "panel-title") == "Head 2.3"
    page.get_by_test_id("head-0.1").click()
    page.evaluate("polyhead.select(1, 5)")
    assert page.url.endswith("#1.5")
    titles = []
    for step in (page.go_back, page.go_back, page.go_forward):
        step()
        titles.append(text(page, "panel-title"))
    assert titles == ["Head 0.1", "Head 2.3", "Head 0.1"]
    page.evaluate("location.hash = '#9.9'")
    page.get_by_test_id("panel").wait_for(state="hidden")


def test_kv_groups_stand_together(open_page: Open, make_data: Make) -> None:
    page = open_page(make_data(num_kv_heads=[2, 6, 1]), "#0.4")
    sizes = page.eval_on_selector_all(
        ".group.shared", "groups => groups.map(g => g.querySelectorAll('.head').length)"
    )
    assert sizes == [3, 3, 6]
    assert "kv head 1 with heads 3–5" in page.get_by_test_id("panel").inner_text()


def test_layers_of_several_kinds_go_by_their_names(open_page: Open, make_data: Make) -> None:
    parts = [("encoder", 0), ("decoder", 0), ("cross", 0)]
    page = open_page(make_data(parts=parts), "#2.3")
    assert text(page, "panel-title") == "Head C0.3"
    page.get_by_test_id("head-D0.1").click()
    assert text(page, "panel-title") == "Head D0.1"
    assert page.url.endswith("#1.1")


def test_rounded_weights_are_named_on_the_page(
    open_page: Open, make_data: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyhead.viewer.packing.FLOAT32_BYTES", 0)
    data = make_data()
    page = open_page(data)
    assert "weights rounded to float16" in text(page, "rounded")
    half = np.float32(data.weights[2, 1].astype(np.float16))
    found = page.evaluate(
        "Array.from({length: 81}, (_, i) => polyhead.weight(2, 1, i / 9 | 0, i % 9))"
    )
    np.testing.assert_array_equal(np.float32(found).reshape(9, 9), half)


def test_a_damaged_file_says_so(open_file: Open, make_data: Make, tmp_path: Path) -> None:
    path = write(make_data(), tmp_path / "page.html")
    whole = path.read_text()
    path.write_text(whole[: whole.index('id="weights-1"') + 120])
    page = open_file(path, wait=False)
    page.get_by_text("damaged: the weights of layer 1 cannot be read").wait_for()


@pytest.mark.parametrize("tokens", [0, 1, 256])
def test_any_length_of_text_behaves(open_page: Open, make_data: Make, tokens: int) -> None:
    data = make_data(2, 4, tokens)
    page = open_page(data)
    if not tokens:
        assert "The text is empty" in text(page, "status")
        return
    page.get_by_test_id("head-1.3").click()
    last = tokens - 1
    page.get_by_test_id("heatmap").hover(position=cell_position(page, last, last))
    assert readout(page) == (last, last, data.weights[1, 3, last, last])
    if tokens == 256:
        page.get_by_test_id("zoom-labels").check()
        page.get_by_test_id("heatmap").press("End")
        assert readout(page)[1] == last
        assert page.get_by_test_id("large").evaluate("box => box.scrollLeft") > 1000


@pytest.mark.slow
def test_lines_of_several_heads_are_as_strong_as_their_weights(
    open_page: Open, make_data: Make
) -> None:
    data = make_data()
    page = open_page(data, "#2.4")
    drawn = "[...document.querySelectorAll('#lines line')].map((line) => "
    drawn += "line.getAttribute('stroke-opacity'))"

    def wanted(*heads: tuple[int, int]) -> list[float]:
        rows = [data.weights[layer, head].ravel() for layer, head in heads]
        return [round(float(x), 3) for row in rows for x in row if x >= 0.05]

    assert [float(x) for x in page.evaluate(drawn)] == wanted((2, 4))
    page.get_by_test_id("keep").click()
    page.get_by_test_id("head-0.1").click()
    assert [float(x) for x in page.evaluate(drawn)] == wanted((2, 4), (0, 1))
    colours = page.eval_on_selector_all(
        "#lines line", "nodes => [...new Set(nodes.map((n) => getComputedStyle(n).stroke))]"
    )
    assert len(colours) == 2
    assert "2.4, 0.1" in page.get_by_test_id("lines").get_attribute("aria-label")
    page.get_by_test_id("token-8").hover()  # its lines stand out, the others step back
    rows = [data.weights[at] for at in ((2, 4), (0, 1))]
    faded = [
        round(float(x) * (1 if query == 8 else 0.15), 3)
        for row in rows
        for query, line in enumerate(row)
        for x in line
        if x >= 0.05
    ]
    assert [float(x) for x in page.evaluate(drawn)] == pytest.approx(faded, abs=1.1e-3)
    page.get_by_test_id("lines-2.4").click()
    assert text(page, "panel-title") == "Head 2.4"
    assert text(page, "keep") == "Drop these lines"
    page.get_by_test_id("keep").click()
    page.mouse.move(0, 0)
    assert [float(x) for x in page.evaluate(drawn)] == wanted((2, 4))
    long = open_page(make_data(2, 2, 40, focus=(39, 0)), "#0.1")
    assert "queries 8–39" in long.locator("#lines-note").inner_text()
