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
    seven, forty, three, _ = json.loads(places)
    # The page's are 0, 4, 2 and 5. Other processors round other steps of the training: seen on an
    # AMD EPYC were (3, 3, 5), on an Intel Xeon with matrix tiles (4, 2, 0) and (4, 2, 1). All
    # translations stay right; what the end of the text is read from says nothing.
    assert seven == 0
    assert abs(forty - 4) <= 1
    assert abs(three - 2) <= 1
