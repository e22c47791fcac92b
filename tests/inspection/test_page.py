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

from polyhead.inspection import page as page_module
from polyhead.inspection.page import HeadStatistics, PageData, render, write

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
    return json.loads(Scripts(html).texts["page-data"])


def unpacked(html: str) -> np.ndarray:
    """The weights as a reader of the file finds them, in full [L, H, T, T]."""
    scripts, header = Scripts(html).texts, header_of(html)
    layers, heads, tokens = header["layers"], header["heads"], len(header["tokens"])
    found = np.zeros((layers, heads, tokens, tokens), np.float32)
    for layer in range(layers):
        raw = gzip.decompress(base64.b64decode(scripts[f"weights-{layer}"]))
        values = np.frombuffer(raw, "<f2" if header["half"] else "<f4").reshape(heads, -1)
        if header["triangle"]:
            rows, columns = np.tril_indices(tokens)
            found[layer][:, rows, columns] = values
        else:
            found[layer] = values.reshape(heads, tokens, tokens)
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
def test_packed_weights_come_back_bit_for_bit(tokens: int, causal: bool) -> None:
    weights = (
        softmax_weights(3, 4, tokens, causal=causal) if tokens else np.zeros((3, 4, 0, 0), "f4")
    )
    html = render(page_data(tokens=["x"] * tokens, weights=weights))
    np.testing.assert_array_equal(unpacked(html), weights)
    assert header_of(html)["triangle"] == (causal or tokens < 2)
    assert header_of(html)["rounded"] is False


def test_one_weight_above_the_diagonal_keeps_the_whole_rectangle() -> None:
    weights = softmax_weights(2, 4, 5)
    weights[1, 3, 0, 4] = 1e-30
    html = render(page_data(weights=weights))
    assert header_of(html)["triangle"] is False
    np.testing.assert_array_equal(unpacked(html), weights)


def test_weights_in_any_memory_order_are_packed_alike() -> None:
    weights = softmax_weights(2, 4, 5)
    turned = np.asfortranarray(weights)
    assert render(page_data(weights=turned)) == render(page_data(weights=weights))


def test_many_weights_are_rounded_to_float16_and_the_page_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = softmax_weights(2, 4, 5)
    monkeypatch.setattr(page_module, "FLOAT32_BYTES", 2 * 4 * 15 * 4 - 1)
    html = render(page_data(weights=weights))
    assert header_of(html)["rounded"] is True
    np.testing.assert_array_equal(unpacked(html), weights.astype(np.float16).astype(np.float32))


def test_float16_weights_are_kept_and_not_called_rounded() -> None:
    weights = softmax_weights(2, 4, 5).astype(np.float16)
    html = render(page_data(weights=weights))
    assert header_of(html)["rounded"] is False
    np.testing.assert_array_equal(unpacked(html), weights.astype(np.float32))


@pytest.mark.parametrize(("causal", "most"), [(True, 4), (False, 3)])
def test_too_many_tokens_are_refused_with_the_number_that_fits(
    monkeypatch: pytest.MonkeyPatch, causal: bool, most: int
) -> None:
    monkeypatch.setattr(page_module, "FLOAT16_BYTES", 2 * 4 * 10 * 2)
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
    ("changes", "error", "words"),
    [
        ({"weights": softmax_weights(2, 4, 5).astype(np.float64)}, TypeError, "float32.*float64"),
        ({"tokens": ["one"]}, ValueError, r"tokens=1 .*got \[2, 4, 5, 5\]"),
        ({"weights": softmax_weights(1, 1, 5)[0]}, ValueError, "layers, heads, tokens, tokens"),
        ({"weights": np.full((2, 4, 5, 5), np.nan, "f4")}, ValueError, "finite.*layer 0"),
        ({"weights": -softmax_weights(2, 4, 5)}, ValueError, "not negative.*layer 0"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide the 4 heads.*got 3"),
        ({"num_kv_heads": [2]}, ValueError, r"each of the 2 layers: got \[2\]"),
        (
            {"statistics": {"x": np.zeros((4, 2))}},
            ValueError,
            r"statistics\['x'\].*\[2, 4\].*\[4, 2\]",
        ),
        ({"layer_names": [("E0", "Encoder 0")]}, ValueError, "each of the 2 layers: got 1"),
        ({"focus": (5, 0)}, ValueError, r"focus.*< 5 tokens: got \(5, 0\)"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_name(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        render(page_data(**changes))


def test_kv_heads_may_differ_by_layer() -> None:
    assert header_of(render(page_data(num_kv_heads=[1, 4])))["kvHeads"] == [1, 4]


def test_statistics_default_to_those_of_the_weights_and_given_ones_replace_them() -> None:
    names = [column["name"] for column in header_of(render(page_data()))["statistics"]]
    assert names == list(HeadStatistics.from_weights(softmax_weights(2, 4, 5)).named())
    given = np.arange(8, dtype=np.float32).reshape(2, 4)
    given[0, 0] = np.nan
    (column,) = header_of(render(page_data(statistics={"mine": given})))["statistics"]
    assert column["values"] == [[None, 1, 2, 3], [4, 5, 6, 7]]


def test_statistics_equal_the_loops_of_their_definitions() -> None:
    weights = softmax_weights(2, 3, 6)
    weights[1, 2, 4] = 0  # a query that sees nothing is left out of the means
    found = HeadStatistics.from_weights(weights).named()
    for layer, head in np.ndindex(2, 3):
        rows = [
            (q, row.astype(float)) for q, row in enumerate(weights[layer, head]) if q and row.any()
        ]
        expected = {
            "entropy": np.mean([-sum(w * np.log(w) for w in row if w > 0) for _, row in rows]),
            "first_token": np.mean([row[0] for _, row in rows]),
            "previous_token": np.mean([row[q - 1] for q, row in rows]),
            "self_token": np.mean([row[q] for q, row in rows]),
            "mean_distance": np.mean(
                [sum(w * abs(q - k) for k, w in enumerate(row)) for q, row in rows]
            ),
            "max_weight": np.mean([row.max() for _, row in rows]),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][layer, head], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("tokens", [0, 1])
def test_statistics_of_a_text_without_a_second_token_are_nan(tokens: int) -> None:
    found = HeadStatistics.from_weights(np.ones((2, 3, tokens, tokens), np.float32))
    assert all(np.isnan(numbers).all() for numbers in found.named().values())


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
