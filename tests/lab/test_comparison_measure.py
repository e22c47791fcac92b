"""What variants cost, measured; and the report that says it."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from polyhead.errors import ConfigError, DisagreementError
from polyhead.lab.comparison import document as report
from polyhead.lab.comparison import measure
from polyhead.lab.comparison.measure import cache_bytes, speeds
from polyhead.lab.comparison.page import page, plot
from polyhead.lab.comparison.runs import Schedule, begin
from polyhead.lab.comparison.variants import Sizes, decoder, variant, variants

SIZES = Sizes(64, 2, 8, 96, 300, 2048)


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("mha", 2 * 8 * 8),
        ("gqa:4", 2 * 4 * 8),
        ("gqa:2", 2 * 2 * 8),
        ("mqa", 2 * 8),
        ("mla:32+4", 32 + 4),
        ("window:64", 2 * 8 * 8 * 64 / 256),
    ],
)
def test_caches_have_the_bytes_of_the_formulas(name, elements):
    held = cache_bytes(begin(decoder(variant(name), SIZES), 0), 256)
    assert held / 256 == 2 * 4 * elements  # layers, bytes


def test_a_cache_that_is_not_as_planned_is_an_error(monkeypatch):
    class Wrong:
        cache_bytes = 1

    monkeypatch.setattr(measure, "plan", lambda *args, **options: Wrong)
    with pytest.raises(DisagreementError, match="65,536 bytes, its plan says 1"):
        cache_bytes(begin(decoder(variant("mha"), SIZES), 0), 16)


def test_speeds_are_measured_of_every_variant_in_turns():
    chosen, calls = variants("mla:32+4,window:8", SIZES), []
    found = speeds(
        chosen, SIZES, Schedule(1, 16, 2), lengths=(16, 64), turns=2,
        advance=lambda *call: calls.append(call),
    )  # fmt: skip
    assert list(found) == ["mha", "mla:32+4", "window:8"]
    assert calls == [
        (f"measuring {name}", done, 6) for done, name in enumerate([*found, *found], 1)
    ]
    for row in found.values():
        assert row["train"] > 0
        assert row["step_bytes"] is None or row["step_bytes"] > 0
        for name in ("prefill", "decode", "cache"):
            assert list(row[name]) == ["16", "64"]
            assert min(row[name].values()) > 0
    with pytest.raises(ConfigError, match="max_positions=2048 are too few to measure 2048"):
        speeds(chosen, SIZES, Schedule(1, 16, 2), lengths=(2048,))


@pytest.fixture
def made(experiment):
    """A report on losses that are made up: mqa worse, gqa:2 like mha, mla without runs."""
    chosen = variants("mqa,gqa:2,mla:16+4", experiment.sizes)
    losses = {
        "mha": [3.00, 3.10, 2.90],
        "mqa": [3.20, 3.31, 3.09],
        "gqa:2": [3.02, 3.08, 2.91],
        "mla:16+4": [],
    }
    results = {
        name: {
            seed: {
                "loss": loss,
                "bits_per_byte": loss,
                "curve": [(256, 4.0 + seed + (name != "mha")), (512, loss)],
            }
            for seed, loss in enumerate(row)
        }
        for name, row in losses.items()
    }
    measured = {
        each.name: {
            "train": 1e4,
            "prefill": {"1024": 1.0, "8192": 2.0},
            "decode": {"1024": 3.0, "8192": 4.0},
            "cache": {n: int(n) * 8 * (index + 1) for n in ("1024", "8192")},
            "step_bytes": 3 << 20,
        }
        for index, each in enumerate(chosen)
    }
    return report.document(experiment, chosen, results, measured)


def test_the_report_pairs_seeds_and_says_what_cannot_be_told(made):
    mha, mqa, gqa, mla = made["variants"]
    assert mha["loss"] == pytest.approx(3.0)
    assert "difference" not in mha
    assert mqa["difference"]["mean"] == pytest.approx(0.2)
    assert mqa["difference"]["half_width"] == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)
    assert mqa["difference"]["distinguishable"]
    assert mqa["course"] == [(256, pytest.approx(1.0)), (512, pytest.approx(0.2))]
    assert not gqa["difference"]["distinguishable"]
    assert mla["difference"] is None
    tokens = made["schedule"]["tokens"]
    assert "+0.2000 ± 0.0248 nats a token (95 %, 3 pairs): worse than mha" in report.verdict(
        mqa, tokens
    )
    said = report.verdict(gqa, tokens)
    needed = gqa["difference"]["needed"]
    assert needed > 3
    assert "not distinguishable from mha" in said
    assert f"takes {needed} seeds of {tokens:,} tokens" in said
    assert gqa["difference"]["needed_tokens"] == 2 * needed * tokens
    assert "no interval yet, finished runs: 0" in report.verdict(mla, tokens)
    better = {**mqa, "difference": {**mqa["difference"], "mean": -0.2}}
    assert report.verdict(better, tokens).endswith("better than mha")
    json.dumps(made, allow_nan=False)


def test_the_report_warns_of_few_tokens_and_few_runs(made):
    few, fewer = made["warnings"]
    assert "512 tokens: below 1,000,000, short runs invert the order" in few
    assert "fewer than two runs" in fewer


def test_the_table_shows_losses_and_costs(made):
    row = report.cells(made["variants"][1])
    assert row["less mha"] == "+0.2000 ± 0.0248"
    assert (row["cache 1k"], row["cache 8k"], row["step MiB"]) == ("16", "16", "3")
    assert (row["prefill 8k"], row["decode 1k"], row["training"]) == ("2", "3", "10,000")
    first, second = report.tables(made)
    headings = [column.header for column in first.columns]
    assert headings == ["variant", "parameters", "runs", "loss", "less mha", "… at 0k"]
    assert row["… at 0k"] == "+1.0000"
    assert len(second.rows) == 4
    assert "differ by at most" in " ".join(report.sentences(made))


def test_the_picture_has_a_point_for_each_variant_that_was_trained(made):
    drawn = plot(made)
    tree = ElementTree.fromstring(drawn)
    circles = [each for each in tree.iter() if each.tag.endswith("circle")]
    assert len(circles) == 3  # mla has no runs
    xs = [float(each.get("cx")) for each in circles]
    assert xs == sorted(xs)  # by cache bytes
    ys = [float(each.get("cy")) for each in circles]
    assert ys[1] < min(ys[0], ys[2])  # mqa, the greatest loss, on top
    assert "cache bytes a token at 8,192 tokens" in drawn
    for row in made["variants"]:
        row["speed"] = None
    assert "nothing to draw" in plot(made)


def test_the_page_stands_alone_and_holds_the_numbers(made):
    text, links = page(made), []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            links.extend(value for key, value in attrs if key in ("src", "href"))

    Parser().feed(text)
    assert links == []
    assert "<svg" in text
    assert re.search(r"<td>mqa</td>.*<td>\+0\.2000 ± 0\.0248</td>", text)
    assert 'class="warning">each run read 512 tokens' in text
    assert "&quot;" not in text
    assert '"variant": "mqa"' in text
