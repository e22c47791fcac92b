"""The page as a file: packed weights come back, text stays text, writing is all or nothing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from polyhead.viewer import packing
from polyhead.viewer.page import PageData, render, write

HOSTILE = [
    "</script><script>x</script>",
    "<!--",
    "\u2028",
    "\n",
    "\"'",
    "\udc80",
    "😀",
    "{{data}}",
    "",
]


def softmax_weights(layers: int, heads: int, tokens: int, *, causal: bool = True) -> np.ndarray:
    scores = np.random.default_rng(7).normal(size=(layers, heads, tokens, tokens)) * 3
    if causal:
        scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def page_data(**changes: object) -> PageData:
    data = PageData(
        title="a text",
        model="tiny",
        tokens=["The", " cat", " sat", " down", "."],
        weights=softmax_weights(2, 4, 5),
        num_kv_heads=2,
    )
    return replace(data, **changes)


class Scripts(HTMLParser):
    """Every script element by id (or by its place), as a browser would find it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.policy = ""
        self.addresses: list[str | None] = []
        self._name: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [found[name] for name in ("src", "href", "action") if name in found]
        if tag == "script":
            self._name = found.get("id") or f"code-{len(self.texts)}"
            self.texts[self._name] = ""
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._name = None

    def handle_data(self, data: str) -> None:
        if self._name is not None:
            self.texts[self._name] += data


def header_of(html: str) -> dict[str, object]:
    return json.loads(Scripts(html).texts["page-data"])["looks"][0]


def unpacked(html: str) -> np.ndarray:
    """The weights as a reader of the file finds them, in full [L, H, T, T]."""
    scripts, header = Scripts(html).texts, header_of(html)
    tokens, heads = len(header["tokens"]), header["layers"][0]["heads"]
    found = np.zeros((len(header["layers"]), heads, tokens, tokens), np.float32)
    for number, layer in enumerate(header["layers"]):
        raw = gzip.decompress(base64.b64decode(scripts[f"weights-{number}"]))
        values = np.frombuffer(raw, "<f2" if header["half"] else "<f4").reshape(heads, -1)
        if layer["triangle"]:
            rows, columns = np.tril_indices(tokens)
            found[number][:, rows, columns] = values
        else:
            found[number] = values.reshape(heads, tokens, tokens)
    return found


def triangles(html: str) -> list[bool]:
    return [layer["triangle"] for layer in header_of(html)["layers"]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
def test_packed_weights_come_back_bit_for_bit(tokens: int, causal: bool) -> None:
    weights = (
        softmax_weights(3, 4, tokens, causal=causal) if tokens else np.zeros((3, 4, 0, 0), "f4")
    )
    html = render(page_data(tokens=["x"] * tokens, weights=weights))
    np.testing.assert_array_equal(unpacked(html), weights)
    assert triangles(html) == [causal or tokens < 2] * 3
    assert header_of(html)["rounded"] is False


def test_one_weight_above_the_diagonal_keeps_the_whole_rectangle() -> None:
    weights = softmax_weights(2, 4, 5)
    weights[1, 3, 0, 4] = 1e-30
    html = render(page_data(weights=weights))
    assert triangles(html) == [True, False]
    np.testing.assert_array_equal(unpacked(html), weights)


def test_weights_in_any_memory_order_are_packed_alike() -> None:
    weights = softmax_weights(2, 4, 5)
    turned = np.asfortranarray(weights)
    assert render(page_data(weights=turned)) == render(page_data(weights=weights))


def test_many_weights_are_rounded_to_float16_and_the_page_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = softmax_weights(2, 4, 5)
    monkeypatch.setattr(packing, "FLOAT32_BYTES", 2 * 4 * 15 * 4 - 1)
    html = render(page_data(weights=weights))
    assert header_of(html)["rounded"] is True
    np.testing.assert_array_equal(unpacked(html), weights.astype(np.float16).astype(np.float32))


def test_weights_of_24_million_bytes_are_kept_as_they_are() -> None:
    for rows, half in ((2000, False), (2001, True)):
        weights = np.broadcast_to(np.float32(0.5), (1, rows, 3000))
        assert packing.Layout.of([weights]).half is half


def test_float16_weights_are_kept_and_not_called_rounded() -> None:
    weights = softmax_weights(2, 4, 5).astype(np.float16)
    html = render(page_data(weights=weights))
    assert header_of(html)["rounded"] is False
    np.testing.assert_array_equal(unpacked(html), weights.astype(np.float32))


@pytest.mark.parametrize(("causal", "most"), [(True, 4), (False, 3)])
def test_too_many_tokens_are_refused_with_the_number_that_fits(
    monkeypatch: pytest.MonkeyPatch, causal: bool, most: int
) -> None:
    monkeypatch.setattr(packing, "FLOAT16_BYTES", 2 * 4 * 10 * 2)
    data = page_data(weights=softmax_weights(2, 4, 5, causal=causal))
    with pytest.raises(ValueError, match=rf"too many tokens.*got 5;.*at most {most};.*shorten"):
        render(data)
    fits = softmax_weights(2, 4, most, causal=causal)
    render(replace(data, tokens=["x"] * most, weights=fits))


def test_hostile_text_stays_data() -> None:
    data = page_data(
        title="</script>",
        model="<img src=x onerror=alert(1)>",
        tokens=HOSTILE,
        weights=softmax_weights(1, 2, len(HOSTILE)),
        continuation="<!--<script>",
        facts={"</script>": "&lt;"},
    )
    html = render(data)
    header = header_of(html)
    assert header["tokens"] == HOSTILE
    assert (header["title"], header["model"]) == (data.title, data.model)
    assert header["facts"] == [["</script>", "&lt;"]]
    assert set(Scripts(html).texts) == set(Scripts(render(page_data())).texts) - {"weights-1"}
    embedded = Scripts(html).texts["page-data"]
    assert not set("<>&\u2028") & set(embedded)
    assert embedded.isascii()


def test_the_page_names_no_address_and_allows_only_its_own_scripts() -> None:
    html = render(page_data())
    scripts = Scripts(html)
    assert scripts.addresses == ["data:,"]
    assert not re.findall(r"url\(|@import|https?://(?!bottosson)", html)
    assert "default-src 'none'" in scripts.policy
    assert "unsafe-inline" not in scripts.policy
    for name, text in scripts.texts.items():
        if name.startswith("code-"):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in scripts.policy


def test_rendering_is_deterministic() -> None:
    assert render(page_data()) == render(page_data())


@pytest.mark.parametrize(
    "weights",
    [
        np.full((2, 4, 5, 5), np.nan, "f4"),
        np.full((2, 4, 5, 5), np.inf, "f4"),
        -softmax_weights(2, 4, 5),
    ],
)
def test_weights_that_cannot_be_shown_are_refused(weights: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite and not negative: layer 0"):
        render(page_data(weights=weights))


def test_kv_heads_may_differ_by_layer() -> None:
    layers = header_of(render(page_data(num_kv_heads=[1, 4])))["layers"]
    assert [layer["kvHeads"] for layer in layers] == [1, 4]


def test_statistics_keep_their_order_and_have_no_number_where_there_is_none() -> None:
    given = np.arange(8, dtype=np.float32).reshape(2, 4)
    given[0, 0] = np.nan
    named = {"mine": given, "entropy": given}
    found = header_of(render(page_data(statistics=named)))["statistics"]
    assert list(found) == ["mine", "entropy"]
    assert found["mine"] == [[None, 1, 2, 3], [4, 5, 6, 7]]


def test_layers_may_differ_in_heads_and_in_the_tokens_they_join() -> None:
    """An encoder's layer of 3 heads on 3 source tokens, and cross-attention of 2 written tokens."""
    encoder = softmax_weights(1, 3, 3, causal=False)[0]
    cross = softmax_weights(1, 2, 3, causal=False)[0][:, :2]
    data = page_data(
        weights=[encoder, cross],
        num_kv_heads=1,
        parts=[("encoder", 0), ("cross", 0)],
        runs=[((0, 3), (0, 3)), ((3, 5), (0, 3))],
    )
    html = render(data)
    first, second = header_of(html)["layers"]
    assert (first["part"], first["heads"], second["queries"], second["keys"]) == (
        "encoder", 3, [3, 5], [0, 3],
    )  # fmt: skip
    raw = gzip.decompress(base64.b64decode(Scripts(html).texts["weights-1"]))
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(2, 2, 3), cross)


def test_a_second_look_stands_in_the_same_file_behind_the_first() -> None:
    html = render(page_data(), page_data(title="another", weights=softmax_weights(3, 2, 5)))
    looks = json.loads(Scripts(html).texts["page-data"])["looks"]
    assert [(look["title"], look["block"]) for look in looks] == [("a text", 0), ("another", 2)]
    assert "weights-4" in Scripts(html).texts


def test_write_puts_the_rendered_page_in_place_and_nothing_else(tmp_path: Path) -> None:
    goal = tmp_path / "page.html"
    goal.write_text("old")
    data = page_data(title="漢字 \udc80")
    assert write(data, str(goal)) == goal
    assert goal.read_text(encoding="utf-8") == render(data)
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("error", [PermissionError, OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    goal = tmp_path / "page.html"
    goal.write_text("old")

    def fail(*_: object) -> None:
        raise error("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        write(page_data(), goal)
    assert goal.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_an_oserror(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        write(page_data(), tmp_path / "page.html")
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_and_a_folder_as_goal_are_oserrors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(page_data(), tmp_path / "none" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write(page_data(), tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
