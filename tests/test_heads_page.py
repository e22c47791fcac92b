"""docs/heads.md and docs/findings/: snippets run, in order, and print what the page shows."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

import polyhead as ph

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "heads.md"
FINDINGS = (
    ("induction", 2),
    ("previous-token", 2),
    ("sinks", 2),
    ("copying", 1),
    ("indirect-object", 3),
)
"""Pages that are notebooks too, in English and Chinese (tools/notebooks.py)."""
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d+\.\d+")
NEEDED = ("transformers", "rxnmapper")
"""Packages of single snippets: where one is not installed, its snippets are left out."""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("page", "printing"), [("heads.md", 11), *((f"findings/{name}.md", n) for name, n in FINDINGS)]
)
def test_snippets_print_what_the_page_shows(page, printing, tmp_path, monkeypatch):
    """Words are equal, and numbers within what rounding to the digits shown may change."""
    try:
        ph.load("smollm2")
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    found = SNIPPET.findall((DOCS / page).read_text(encoding="utf-8"))
    assert sum(bool(shown) for _, shown in found) == printing
    names = {}
    for code, shown in found:
        if any(name in code and importlib.util.find_spec(name) is None for name in NEEDED):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert NUMBER.sub("x", printed.getvalue()) == NUMBER.sub("x", shown), code
        numbers = [torch.tensor([float(x) for x in NUMBER.findall(text)])
                   for text in (printed.getvalue(), shown)]  # fmt: skip
        torch.testing.assert_close(*numbers, atol=0.0101, rtol=0.02)


def test_every_picture_is_there_and_its_command_too():
    text = PAGE.read_text(encoding="utf-8")
    pictures = re.findall(r"\]\((pictures/[\w.-]+)\)", text)
    assert len(pictures) == 2
    for picture in pictures:
        assert f"--out docs/{picture}" in text
        assert (PAGE.parent / picture).read_text(encoding="utf-8").startswith("<svg")
