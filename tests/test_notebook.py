"""What notebooks show: HTML that loads nothing and runs nothing, with an id for each output."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from tiny import decoder

import polyhead as ph
from polyhead._utils.notebook import lines, panel, table
from polyhead.conversion.report import Report


class Page(HTMLParser):
    """The tags, attributes and words of an output."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def shown(thing: object) -> Page:
    """What a notebook shows of a thing, once it is known to be harmless."""
    html = thing._repr_html_()
    page = Page(html)
    assert "script" not in page.tags
    assert {name for name, _ in page.attributes} & {"src", "href", "onload", "onclick"} == set()
    assert "url(" not in html
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == 1
    assert f"#{ids[0]} table" in html  # its style is for itself alone
    assert f'id="{ids[0]}"' not in thing._repr_html_()
    return page


@pytest.mark.parametrize(
    ("mask", "side"),
    [
        (ph.Causal() & ph.Window(3), 12),
        (ph.Documents([3, 1, 4]) & ph.Causal(), 8),
        (ph.KeyLengths(5), 5),
        (~ph.Keep(torch.eye(7, dtype=torch.bool)), 7),
    ],
)
def test_a_mask_is_drawn_as_large_as_it_must_be(mask: ph.Mask, side: int) -> None:
    page = shown(mask)
    assert repr(mask) in page.words
    assert dict(page.attributes)["viewbox"] == f"-4 -4 {16 * side + 8} {16 * side + 8}"


def test_a_mask_that_cannot_be_drawn_alone_shows_its_expression() -> None:
    class Odd(ph.Mask):
        def visible(self, q: object, k: object, device: object) -> torch.Tensor:
            raise NotImplementedError

        def __repr__(self) -> str:
            return "Odd(<b>)"

    page = shown(Odd())
    assert "Odd(<b>)" in page.words
    assert "svg" not in page.tags


def test_explanations_plans_and_reports_show_what_they_print() -> None:
    q = torch.zeros(1, 2, 4, 8)
    explained = ph.explain(q, q, q, mask=ph.Causal())
    page = shown(explained)
    for word in (explained.kernel, *explained.refusals, explained.summary, "reads at least"):
        assert word in page.words
    plan = ph.plan("gpt2", tokens=64)
    assert str(plan) in shown(plan).words
    report = object.__new__(Report)
    object.__setattr__(report, "source", "tiny <b>")
    Report.__str__, printed = (lambda self: "cache 4 → 2 & <i>"), Report.__str__
    try:
        page = shown(report)
    finally:
        Report.__str__ = printed
    assert "Conversion of tiny <b>" in page.words
    assert "cache 4 → 2 & <i>" in page.words
    assert page.tags.count("b") == 1


def test_a_probe_shows_a_line_for_each_attention() -> None:
    model = decoder().eval()
    ids = torch.arange(3, 15)[None]
    with ph.probe(model) as seen, torch.inference_mode():
        model(ids)
    page = shown(seen)
    assert page.tags.count("tr") == 1 + len(seen)
    assert f"{float(seen[1].summary().entropy.mean()):.3f}" in page.words
    with ph.probe(model, statistics=["entropy"]) as few, torch.inference_mode():
        model(ids)
    assert "–" in shown(few).words


def test_text_never_becomes_markup() -> None:
    hostile = "</pre><script>alert(1)</script>"
    html = panel(hostile, lines(hostile), table([hostile], [[hostile]]))
    assert "<script" not in html
    assert Page(html).words.count("alert(1)") == 4
    assert len(set(re.findall(r'id="(polyhead-\w+)"', html + panel("a")))) == 2
