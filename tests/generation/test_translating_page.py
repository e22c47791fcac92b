"""The page on translating does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "translating.md"


@pytest.mark.slow
def test_the_model_of_the_page_learns_numbers_and_reads_the_words_that_it_writes(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    _, training, looking = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    exec(training + looking, {})
    right, places = capsys.readouterr().out.splitlines()
    assert int(right.split()[0]) >= 130
    seven, tens, ones, end = json.loads(places)
    assert (seven, ones, end) == (0, 2, 5)
    # The page's is 4. Other processors round other steps of the training, and 3 ("und") may win.
    assert tens in (3, 4)
