"""docs/attention.md: its snippets run, in order, and print what the page says they print."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs" / "attention.md"
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def test_snippets_run_and_print_what_the_page_shows():
    found = SNIPPET.findall(PAGE.read_text(encoding="utf-8"))
    assert sum(bool(shown) for _, shown in found) == 6
    names = {}
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, names)
        assert printed.getvalue() == shown, code
    assert names["cache"].length == 10
    torch.compiler.reset()
