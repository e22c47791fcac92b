"""The page of a server's load: it asks for the key, and shows rows, pages and heads."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest

from browser.serving import HANG
from browser.test_axe import violations
from polyhead._utils.texts import every
from polyhead.viewer.load_page import render

pytestmark = pytest.mark.browser

KEY = "a-long-key"


@pytest.mark.parametrize(
    ("width", "scheme", "locale"), [(1400, "dark", "en-US"), (390, "light", "zh-CN")]
)
def test_the_load_is_shown_to_who_has_the_key(
    chromium: Any, width: int, scheme: str, locale: str
) -> None:
    pytest.importorskip("axe_playwright_python")
    pytest.importorskip("prometheus_client")
    from serving.served_tiny import listening, models_of, tiny_decoder

    models = models_of(tiny_decoder(), {"max_rows": 4})
    engine = models["tiny"].engine
    assert engine is not None
    step = engine.step

    def slow() -> bool:
        time.sleep(0.2)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    with listening(models, keys=[KEY], page=render(), show_heads=True) as port:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, locale=locale
        )
        page = context.new_page()
        page.set_default_timeout(HANG)
        asked, errors = list[str](), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_test_id("enter").wait_for()
        assert page.get_by_test_id("model").count() == 0
        page.get_by_test_id("key").fill("another-key")
        page.get_by_test_id("open").click()
        page.get_by_test_id("status").wait_for()
        caller = hashlib.sha256(KEY.encode()).hexdigest()
        rows = [engine.submit("Twice " * n, max_new_tokens=400, share_with=caller) for n in (1, 9)]
        page.get_by_test_id("key").fill(KEY)
        page.get_by_test_id("open").click()
        page.get_by_test_id("look-at").nth(1).click()
        page.locator("#text span").nth(54).wait_for()
        assert page.locator("#text").text_content().startswith("Twice␣Twice")
        assert page.get_by_test_id("request").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert violations(page) == []
        for row in rows:
            row.cancel()
        page.get_by_test_id("request").first.wait_for(state="detached")
        page.get_by_test_id("look").click()
        gone = every("load")["zh" if locale == "zh-CN" else "en"]["head_gone"]
        page.get_by_text(gone).wait_for()
        assert {url.split("/")[2] for url in asked} == {f"127.0.0.1:{port}"}
        assert errors == []
        context.close()
        engine.step = step  # type: ignore[method-assign]
