"""The views of one pair, of a way, of the next token, of cross-attention and of two looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import polyhead as ph
from browser.serving import TEXT, map_of, text_of
from polyhead.interpret.heads import TokenizedText
from polyhead.viewer.looks import look_at
from polyhead.viewer.page import PageData, write

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Full = Callable[..., PageData]


def numbers(page: Any, selector: str) -> list[float]:
    words = page.locator(selector).all_inner_texts()
    return [float(word.replace("−", "-").replace("∞", "inf")) for word in words]


def test_a_pairs_products_add_up_to_its_score_and_the_row(
    open_page: Open, make_full: Full, model: ph.LanguageModel
) -> None:
    look = look_at("tiny", model, TokenizedText.of(model.tokenizer, TEXT), {})
    page = open_page(make_full(focus=(20, 3)), "#1.2")
    for query, key in ((20, 3), (20, 7), (11, 7)):
        page.get_by_test_id("pair-query").select_option(str(query))
        page.get_by_test_id("pair-key").select_option(str(key))
        found = look.product(1, 2, query, key)
        shown = [
            float(text_of(page, f"pair-{name}").replace("−", "-"))
            for name in ("raw", "score", "weight")
        ]
        wanted = [found.raw[key], found.scores[key], found.weights[key]]
        assert shown == pytest.approx([float(x) for x in wanted], rel=2e-3, abs=1e-3)
        bars = page.locator("#pair-products rect title").all_text_contents()[-8:]
        products = [float(bar.rpartition("= ")[2].replace("−", "-")) for bar in bars]
        assert products == pytest.approx((found.q * found.k).tolist(), rel=1e-2, abs=1e-3)
        assert sum(products) == pytest.approx(float(found.raw[key]), abs=0.02)
        row = numbers(page, "#pair-row tr.chosen td")
        assert row[-1] == pytest.approx(float(found.weights[key]), rel=1e-5)
    page.get_by_test_id("pair-key").select_option("25")  # comes after the query
    assert text_of(page, "pair-score") == "−∞"
    assert "masked" in text_of(page, "pair-softmax")
    without = open_page(make_full(vectors=None), "#1.2")
    assert "too long for its queries and keys" in text_of(without, "pair-missing")
    shares = open_page(make_full(shares=[False, True]), "#1.2")
    assert "This head has no softmax" in text_of(shares, "pair-missing")


def test_the_way_of_a_token_and_its_guesses_follow_the_chosen_query(
    open_page: Open, make_full: Full, model: ph.LanguageModel
) -> None:
    look = look_at("tiny", model, TokenizedText.of(model.tokenizer, TEXT), {})
    page = open_page(make_full(), "#0.1")
    for query in (29, 12):
        page.get_by_test_id("pair-query").select_option(str(query))
        way = look.way(query)
        assert f"({query})" in page.locator("#way-title").inner_text()
        last = page.get_by_test_id("way-1").locator("td").all_inner_texts()
        sizes = [way["sizes"][name][1] for name in ("attention", "feed_forward", "stream")]
        assert [float(x) for x in last[:3]] == pytest.approx(sizes, rel=1e-3)
        for layer in (-1, 0, 1):
            token, share = way["guesses"][layer + 1][0]
            said = page.get_by_test_id(f"way-{layer}").locator(".guess").inner_text()
            assert said == f"{token}{share:.3f}"


def test_temperature_and_top_k_give_the_probabilities_of_generation(
    open_page: Open, make_full: Full, model: ph.LanguageModel
) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([model.tokenizer.encode(TEXT)]), last=1)[0, -1].double()
    page = open_page(make_full(), "#0.1")
    for place, heat, top_k in ((9, 1.0, 0), (4, 0.5, 0), (19, 2.0, 3)):
        page.get_by_test_id("temperature").fill(str(place))
        page.get_by_test_id("top-k").fill(str(top_k))
        assert text_of(page, "temperature-said") == f"{heat}"
        scores = (logits / heat).sort(descending=True).values
        kept = scores[:top_k] if top_k else scores
        wanted = torch.zeros(12, dtype=torch.float64)
        shares = kept.softmax(0)[:12]
        wanted[: len(shares)] = shares
        assert numbers(page, "[data-testid=next-table] td") == pytest.approx(
            wanted.tolist(), abs=6e-5
        )
    page.get_by_test_id("top-k").fill("1")
    page.get_by_test_id("draw-token").click()
    first = page.locator("#next th").first.inner_text()
    assert text_of(page, "drawn") == f"drawn: {first}"


def test_cross_attention_is_a_map_of_written_on_source_tokens(
    open_page: Open, make_data: Callable[..., PageData]
) -> None:
    rng = np.random.default_rng(0)
    cross = rng.dirichlet(np.ones(5), size=(2, 4)).astype(np.float32)  # 2 heads, 4 on 5 tokens
    whole = make_data(1, 6, 9)
    data = replace(
        whole,
        weights=[np.asarray(whole.weights)[0], cross],
        statistics={},
        num_kv_heads=[2, 2],
        parts=[("decoder", 0), ("cross", 0)],
        runs=[((0, 9), (0, 9)), ((5, 9), (0, 5))],
        focus=None,
        own=5,
    )
    page = open_page(data, "#1.1")
    assert text_of(page, "panel-title") == "Head C0.1"
    torch.testing.assert_close(map_of(page), torch.from_numpy(cross[1]))
    queries = page.get_by_test_id("pair-query").locator("option").all_inner_texts()
    keys = page.get_by_test_id("pair-key").locator("option").all_inner_texts()
    assert [words.split()[-1] for words in queries] == list("5678")
    assert [words.split()[-1] for words in keys] == list("01234")
    page.get_by_test_id("heatmap").press("ArrowDown")
    page.get_by_test_id("heatmap").press("End")
    assert [text_of(page, f"readout-{side}-index") for side in ("query", "key")] == ["8", "4"]
    assert float(text_of(page, "readout-weight")) == pytest.approx(float(cross[1, 3, 4]), rel=1e-6)
    page.get_by_test_id("token-6").hover()
    most = int(cross[1, 1].argmax())
    assert text_of(page, "sentence-out").startswith(
        f"it looks at {data.tokens[most].strip()} {cross[1, 1].max():.3f}"
    )
    page.get_by_test_id("head-D0.3").click()
    assert text_of(page, "panel-title") == "Head D0.3"


def test_two_looks_stand_beside_each_other_in_one_file(
    open_file: Open, make_full: Full, model: ph.LanguageModel, tmp_path: Any
) -> None:
    path = write(make_full(), tmp_path / "page.html", make_full("Another text"))
    page = open_file(path, "#1.2")
    look = look_at("tiny", model, TokenizedText.of(model.tokenizer, "Another text"), {})
    rows = np.stack([look.row(1, 2, query) for query in range(12)])
    torch.testing.assert_close(map_of(page, 1), torch.from_numpy(rows))
    assert text_of(page, "beside-note") == "tiny: Another text"
    assert "nats" in text_of(page, "numbers")
