"""``polyhead perplexity``: the library's figures."""

from __future__ import annotations

import json
from pathlib import Path

from process import Run

import polyhead as ph
from polyhead.generation import LanguageModel


def test_figures_are_those_of_the_library(run: Run, tiny: str, tmp_path: Path) -> None:
    text = "The animal didn't cross the street because it was too tired. " * 3
    (tmp_path / "text.txt").write_text(text)
    result = run("perplexity", tiny, "text.txt", "--window", "32", "--json")
    found = ph.perplexity(ph.load(tiny, expect=LanguageModel), text, window=32)
    assert (result.code, result.err) == (0, "")
    shown = json.loads(result.out)
    assert shown["tokens"] == found.tokens
    assert abs(shown["nats"] - found.nats) < 1e-3
    assert run("perplexity", tiny, "text.txt").out.startswith("perplexity ")
    refused = run("perplexity", tiny, "text.txt", "--window", "1000")
    assert refused.code == 2
    assert "window must be a whole number from 2 to 96" in refused.err
