"""Pages of docs/: their snippets run, in order, and print what the page says they print."""

import contextlib
import io
import operator
import re
import warnings
from pathlib import Path

import pytest
import torch

import polyhead as ph
from mask_pictures import pictures

DOCS = Path(__file__).parents[1] / "docs"
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize(("page", "printing"), [("attention.md", 7), ("caches.md", 8)])
def test_snippets_run_and_print_what_the_page_shows(page, printing):
    found = SNIPPET.findall((DOCS / page).read_text(encoding="utf-8"))
    assert sum(bool(shown) for _, shown in found) == printing
    names = {}
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, names)
        assert printed.getvalue() == shown, code
    torch.compiler.reset()


def test_pictures_of_masks_are_those_that_their_command_writes():
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[.+?\]\(pictures/(.+?)\)", page)
    assert "python tests/mask_pictures.py" in page
    assert shown == list(pictures())
    for name, picture in pictures().items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == picture, name


def test_the_reference_has_every_public_name():
    named = set()
    for page in sorted((DOCS / "reference").glob("*.md")):
        named |= set(re.findall(r"^::: polyhead\.(\S+)$", page.read_text(encoding="utf-8"), re.M))
    assert set(ph.__all__) <= named
    for name in named:
        assert operator.attrgetter(name)(ph).__doc__, name
