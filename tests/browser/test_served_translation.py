"""The served page of an encoder-decoder: maps of encoder, decoder and cross-attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer

import polyhead as ph
from browser.serving import HANG, TOKEN, map_of, open_head, serving, text_of
from polyhead.config import TransformerConfig
from polyhead.viewer.studio import Studio

pytestmark = pytest.mark.browser

SOURCE = "wir sehen"
FAMILIES = ["2017", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "marian"))]


@pytest.fixture(scope="module", params=FAMILIES)
def translator(request: pytest.FixtureRequest, tmp_path_factory: Any) -> ph.TextToText:
    """A random encoder-decoder with 2 + 2 layers of 4 heads."""
    if request.param != "2017":
        from pairs import make_pair

        return make_pair(request.param, tmp_path_factory.mktemp("pair"))[1]
    torch.manual_seed(1)
    config = TransformerConfig.vanilla(259, 24, 2, 4, 40, max_positions=32)
    model = ph.Transformer(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return ph.TextToText(model, byte_tokenizer())


@pytest.fixture(scope="module")
def studio(translator: ph.TextToText) -> Studio:
    return Studio({"translator": translator}.__getitem__, ["translator"])


@pytest.fixture(scope="module")
def address(studio: Studio) -> Iterator[str]:
    yield from serving(studio, SOURCE)


@pytest.fixture
def page(chromium: Any, address: str) -> Iterator[Any]:
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(HANG)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(f"{address}{TOKEN}/")
    page.evaluate("polyhead.ready")
    yield page
    page.close()
    assert complaints == []


def test_all_views_of_a_translation_are_served(page: Any, studio: Studio) -> None:
    look = studio[1]
    assert text_of(page, "shown") == "24 heads"
    names = page.evaluate("[...document.querySelectorAll('.layer-name')].map(x => x.textContent)")
    assert names == ["E0", "E1", "D0", "D1", "C0", "C1"]
    page.wait_for_function("() => [...Array(6).keys()].every((i) => polyhead.look.statistics[i])")
    for layer, name in ((0, "E0.1"), (2, "D0.1"), (5, "C1.1")):
        open_head(page, f"{layer}.1")
        page.evaluate("polyhead.settled()")
        assert text_of(page, "panel-title") == f"Head {name}"
        torch.testing.assert_close(map_of(page), look.layers[layer].view.rows()[0, 1])
    # Written tokens look at the source: the pair's products make up its weight.
    (q0, _), (k0, _) = look.layers[5].queries, look.layers[5].keys
    page.get_by_test_id("pair-query").select_option(str(q0 + 1))
    page.get_by_test_id("pair-key").select_option(str(k0 + 2))
    page.evaluate("polyhead.settled()")
    weight = float(look.layers[5].view.rows()[0, 1, 1, 2])
    assert float(text_of(page, "pair-weight")) == pytest.approx(weight, rel=1e-5)
    assert page.get_by_test_id("way-table").is_visible()
    assert page.get_by_test_id("next-view").is_visible()
    assert page.get_by_test_id("ablate").is_hidden()  # the decoder's own heads alone
    open_head(page, "3.2")
    page.get_by_test_id("ablate").click()
    page.get_by_test_id("next-without-0").wait_for()
    assert "without D1.2" in text_of(page, "ablated")
