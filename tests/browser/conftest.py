"""One Chromium for the session; each test opens its own page from a file, with the network off."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import byte_tokenizer, decoder
from torch import nn

import polyhead as ph
from browser.serving import HANG, TEXT, TOKEN, Visit, serving
from head_statistics import head_statistics
from polyhead.interpret.heads import TokenizedText
from polyhead.viewer.look_page import page_data
from polyhead.viewer.looks import look_at
from polyhead.viewer.page import PageData, write
from polyhead.viewer.studio import Studio

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: opens pages in a headless Chromium")


def _unavailable(reason: str) -> None:
    if os.environ.get("POLYHEAD_REQUIRE_BROWSER") == "1":
        pytest.fail(f"POLYHEAD_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, shared by all tests of the session."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _unavailable("playwright is not installed (pip install playwright)")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        _unavailable(f"no Chromium was found (looked for {', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def open_file(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file at `#fragment`; any console message or foreign request fails the test."""
    with ExitStack() as stack:
        complaints: list[str] = []

        def open_(path: Path, fragment: str = "", *, wait: bool = True, **options: Any) -> Any:
            context = chromium.new_context(**{"viewport": {"width": 1400, "height": 900}} | options)
            stack.callback(context.close)
            context.set_offline(True)
            page = context.new_page()
            page.set_default_timeout(HANG)
            page.on("console", lambda message: complaints.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
            page.on("dialog", lambda dialog: (complaints.append("dialog"), dialog.dismiss()))
            address = path.resolve().as_uri()
            page.on(
                "request",
                lambda request: (
                    None
                    if request.url.partition("#")[0] == address
                    else complaints.append(f"request: {request.url[:80]}")
                ),
            )
            page.goto(address + fragment)
            if wait:
                page.evaluate("polyhead.ready")
            return page

        yield open_
        assert complaints == []


@pytest.fixture
def open_page(open_file: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Writes the page of some data and opens it; see `open_file`."""

    def open_(data: PageData, fragment: str = "", **options: Any) -> Any:
        return open_file(write(data, tmp_path / "page.html"), fragment, **options)

    return open_


@pytest.fixture
def make_data() -> Callable[..., PageData]:
    """Data with causal weights that have a sink, previous-token heads and noise."""

    def make(
        layers: int = 3, heads: int = 6, tokens: int = 9, *, causal: bool = True, **changes: Any
    ) -> PageData:
        rng = np.random.default_rng(layers * 100 + heads * 10 + tokens)
        scores = rng.normal(size=(layers, heads, tokens, tokens)) * 2
        query = np.arange(1, tokens)
        scores[:, ::3, :, :1] += 5
        scores[:, 1::3, query, query - 1] += 5
        if causal:
            scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
        highest = scores.max(-1, keepdims=True) if tokens else 0.0
        powers = np.exp(scores - highest)
        weights = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
        words = ["The", " animal", " was", " too", " tired", ",", " it", " slept", "."]
        given: dict[str, Any] = {
            "title": "The animal was too tired, it slept.",
            "model": "tiny",
            "tokens": [words[i % len(words)] for i in range(tokens)],
            "weights": weights,
            "num_kv_heads": 2,
            "continuation": " And then?",
            "facts": {"kernel": "tiled"},
            "focus": (6, 1) if tokens > 6 else None,
        }
        given |= changes
        given.setdefault("statistics", head_statistics(np.asarray(given["weights"])))
        return PageData(**given)

    return make


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    """A tiny random decoder of 2 layers with 4 heads, a token per byte."""
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


@pytest.fixture
def make_full(model: ph.LanguageModel) -> Callable[..., PageData]:
    """The page of a real run, with all views inside."""

    def make(text: str = TEXT, **changes: Any) -> PageData:
        tokens = TokenizedText.of(model.tokenizer, text)
        return replace(page_data(look_at("tiny", model, tokens, {})), **changes)

    return make


@pytest.fixture(scope="module")
def address(model: ph.LanguageModel) -> Iterator[str]:
    """Where ``model`` is served, beside another whose first attention adds nothing."""
    other = ph.LanguageModel(decoder().requires_grad_(False), byte_tokenizer(), "other").eval()
    nn.init.zeros_(other.transformer.layers[0].attention.o_proj.weight)
    models = {"tiny": model, "other": other}
    yield from serving(Studio(models.__getitem__, list(models)), TEXT)


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Visit]:
    """Opens the page; a console message or a request to elsewhere fails the test."""
    contexts, complaints = [], []

    def visit(fragment: str = "", *, expected: str = "", **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1400, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(HANG)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "console",
            lambda message: (
                None
                if expected and expected in message.text
                else complaints.append(f"console: {message.text}")
            ),
        )
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((address, "data:", "blob:"))
                else complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(f"{address}{TOKEN}/{fragment}")
        page.evaluate("polyhead.ready")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []
